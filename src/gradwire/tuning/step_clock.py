"""Step timing: when backward hands over its buckets, when their means arrive, and how long steps take.

Times are in seconds from the first bucket of a backward pass. A step lasts until the first bucket of the next backward
pass, so it includes what the training script does in between. Work between `StepClock.begin` and the first bucket is
left out.

Differences: on an accelerator a future completes when its work is queued. `StepTiming.finish` is then too early, and
the remainder of the step counts as rest. So `auto` tries each candidate there, whatever is predicted.
"""

# Shapes: B = buckets

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

_OUTLIER = 2.0  # times the median of the steps


@dataclass
class BucketTiming:
    """One bucket of a backward pass.

    Attributes:
        names: Names of its parameters.
        nbytes: Bytes of its gradients.
        ready: When it was handed over.
        done: When its mean arrived; None while that is not known.
        itemsize: Bytes of an element.
    """

    names: tuple[str, ...]
    nbytes: int
    ready: float
    done: float | None = None
    itemsize: int = 4

    @property
    def nbytes_of_half(self) -> int:
        """Bytes of its gradients if they are cast to 16 bits."""
        return self.nbytes // self.itemsize * 2

    @property
    def end(self) -> float:
        """When its mean arrived, or when it was handed over if that is not known."""
        return self.ready if self.done is None else self.done


@dataclass
class StepTiming:
    """One step of this rank, from the first bucket of a backward pass to that of the next.

    Attributes:
        buckets: Buckets in the order in which they were handed over.
        seconds: Length of the whole step.
        link: Seconds in which gradwire's frames were under way, summed over peers.
        sent_bytes: Bytes that gradwire sent, where whoever runs the steps counts them.
        codec: Seconds in which gradwire encoded and decoded, likewise.
    """

    buckets: list[BucketTiming] = field(default_factory=list)
    seconds: float = 0.0
    link: float = 0.0
    sent_bytes: float = 0.0
    codec: float = 0.0

    @property
    def backward(self) -> float:
        """Seconds from the first bucket to the last."""
        return self.buckets[-1].ready if self.buckets else 0.0

    @property
    def finish(self) -> float:
        """When the last mean arrived."""
        return max((bucket.end for bucket in self.buckets), default=0.0)

    @property
    def rest(self) -> float:
        """Seconds in which neither backward nor synchronization runs."""
        return max(0.0, self.seconds - max(self.backward, self.finish))

    @property
    def busy(self) -> float:
        """Seconds in which at least one bucket was under way."""
        total, end = 0.0, 0.0
        for bucket in self.buckets:
            total += max(0.0, bucket.end - max(bucket.ready, end))
            end = max(end, bucket.end)
        return total

    @property
    def synchronizing(self) -> float:
        """Seconds from each bucket to its mean, summed over buckets."""
        return sum(bucket.end - bucket.ready for bucket in self.buckets)


@dataclass(frozen=True)
class Timing:
    """Several steps, the same on all ranks: what is typical of each rank, and the largest of all ranks.

    The fields up to `codec` are those of `StepTiming`.

    Attributes:
        step: Length of a step.
        buckets: Buckets, with the time at which each was handed over.
        num_steps: Number of steps that were timed.
    """

    step: float
    rest: float
    busy: float
    synchronizing: float
    link: float
    sent_bytes: float
    codec: float
    buckets: tuple[BucketTiming, ...]
    num_steps: int

    @classmethod
    def of(cls, steps: Sequence[StepTiming], figures: np.ndarray) -> Timing:
        """Combine this rank's buckets with the largest `typical` figures of all ranks."""
        step, rest, busy, synchronizing, link, sent_bytes, codec, *ready = figures.tolist()
        buckets = [
            BucketTiming(each.names, each.nbytes, at, itemsize=each.itemsize)
            for each, at in zip(steps[-1].buckets, ready, strict=True)
        ]
        return cls(step, rest, busy, synchronizing, link, sent_bytes, codec, tuple(buckets), len(steps))

    @property
    def backward(self) -> float:
        """Seconds from the first bucket to the last."""
        return max((bucket.ready for bucket in self.buckets), default=0.0)

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def nbytes_of_half(self) -> int:
        """Bytes of all buckets if they are cast to 16 bits."""
        return sum(bucket.nbytes_of_half for bucket in self.buckets)


def typical(steps: Sequence[StepTiming]) -> np.ndarray:
    """Return typical figures of this rank's steps: float64[7 + B], the fields of `Timing` and the times of the buckets.

    The length of a step is a mean, since a rank that waits in one step begins the next one early: steps are long and
    short in turns, and their median says little. Steps over twice the median do not count, such as those with an
    evaluation. All other figures are medians.

    DDP rebuilds its buckets after the first step. Steps with another number of buckets than the last are left out.
    """
    rows = np.array([
        [step.seconds, step.rest, step.busy, step.synchronizing, step.link, step.sent_bytes, step.codec]
        + [bucket.ready for bucket in step.buckets]
        for step in steps
        if len(step.buckets) == len(steps[-1].buckets)
    ])  # fmt: skip
    found: np.ndarray = np.median(rows, axis=0)
    found[0] = rows[rows[:, 0] <= _OUTLIER * found[0], 0].mean()
    return found


class StepClock:
    """Records steps. Thread-safe, because means arrive on any thread.

    Args:
        link_busy: Returns the seconds so far in which frames were under way.
    """

    def __init__(self, link_busy: Callable[[], float] = lambda: 0.0) -> None:
        self._link_busy = link_busy
        self._busy_before = 0.0
        self.last: StepTiming | None = None
        self._step = StepTiming()
        self._origin = 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin a step. It ends the one before."""
        with self._lock:
            if self._step.buckets:
                self._step.seconds = time.monotonic() - self._origin
                self._step.link = self._link_busy() - self._busy_before
                self.last = self._step
            self._step = StepTiming()

    def ready(self, names: Sequence[str], gradients: torch.Tensor) -> BucketTiming:
        """Note a bucket that is handed over, of these parameters."""
        with self._lock:
            if not self._step.buckets:
                self._origin, self._busy_before = time.monotonic(), self._link_busy()
            now, itemsize = time.monotonic() - self._origin, gradients.element_size()
            bucket = BucketTiming(tuple(names), gradients.numel() * itemsize, now, itemsize=itemsize)
            self._step.buckets.append(bucket)
            return bucket

    def done(self, bucket: BucketTiming) -> None:
        """Note that the mean of a bucket has arrived."""
        with self._lock:
            bucket.done = time.monotonic() - self._origin
