"""The step clock: when backward hands over its buckets, when their means are there, and how long steps take.

Seconds from the first bucket of a backward. A step lasts from there to the first bucket of the next one, so that it
holds what the user's script does between backwards, too; work of the clock's owner at that point can be left out.

Differences: on an accelerator a future is done when its work is queued. `StepTiming.finish` is then too early, and
what is left of the step counts as rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class BucketTiming:
    """One bucket of a backward.

    Attributes:
        names: its parameters.
        nbytes: of its gradients.
        ready: when it was handed over.
        done: when its mean was there; None if that is not known yet.
    """

    names: tuple[str, ...]
    nbytes: int
    ready: float
    done: float | None = None


@dataclass
class StepTiming:
    """From one backward's first bucket to the next one's.

    Attributes:
        buckets: in the order in which they were handed over.
        seconds: of the whole step.
        link: in which frames were under way, added up over peers.
    """

    buckets: list[BucketTiming] = field(default_factory=list)
    seconds: float = 0.0
    link: float = 0.0

    @property
    def backward(self) -> float:
        """Seconds from the first bucket to the last."""
        return self.buckets[-1].ready if self.buckets else 0.0

    @property
    def finish(self) -> float:
        """When the last mean was there."""
        return max((bucket.ready if bucket.done is None else bucket.done for bucket in self.buckets), default=0.0)

    @property
    def rest(self) -> float:
        """Seconds of the step after the last gradient's mean and before the next first gradient."""
        return max(0.0, self.seconds - max(self.backward, self.finish))

    @property
    def busy(self) -> float:
        """Seconds in which at least one bucket was under way."""
        total, end = 0.0, 0.0
        for bucket in self.buckets:
            done = bucket.ready if bucket.done is None else bucket.done
            total += max(0.0, done - max(bucket.ready, end))
            end = max(end, done)
        return total

    @property
    def synchronizing(self) -> float:
        """Seconds that buckets were under way, added up over buckets."""
        return sum(0.0 if bucket.done is None else bucket.done - bucket.ready for bucket in self.buckets)


class StepClock:
    """Records steps. Thread-safe: means arrive on any thread.

    Args:
        link_busy: tells the seconds so far in which frames were under way.
    """

    def __init__(self, link_busy: Callable[[], float] = lambda: 0.0) -> None:
        self._link_busy = link_busy
        self._busy_before = 0.0
        self.last: StepTiming | None = None
        self._step = StepTiming()
        self._origin: float | None = None
        self._begun = 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """The first bucket of a backward is here: the step before it has ended."""
        now = time.monotonic()
        with self._lock:
            if self._origin is not None:
                self._step.seconds = now - self._begun
                self._step.link = self._link_busy() - self._busy_before
                self.last = self._step
            self._step, self._origin, self._begun, self._busy_before = StepTiming(), now, now, self._link_busy()

    def resume(self) -> None:
        """Leave out what has passed since `begin`."""
        with self._lock:
            self._origin = self._begun = time.monotonic()
            self._busy_before = self._link_busy()

    def ready(self, names: Sequence[str], nbytes: int) -> BucketTiming:
        """A bucket is handed over."""
        with self._lock:
            assert self._origin is not None, "begin comes first"
            bucket = BucketTiming(tuple(names), nbytes, time.monotonic() - self._origin)
            self._step.buckets.append(bucket)
            return bucket

    def done(self, bucket: BucketTiming) -> None:
        """The bucket's mean is there."""
        with self._lock:
            assert self._origin is not None, "begin comes first"
            bucket.done = time.monotonic() - self._origin
