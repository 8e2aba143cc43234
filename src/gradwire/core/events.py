"""The metrics stream: what happened, when, to which tensor, as plain records that anyone may listen to.

Emitting is cheap (an append to a bounded ring and a call a listener) and never raises into the data path.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

logger = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: ``encode``, ``decode``, ``merge``, ``send``, ``recv``, ``submit``, ``done``, ``commit``,
            ``rollback``, ``replica_check``, ``failure``, ``late`` (sent, and not counted).
        start: seconds on the monotonic clock.
        duration: seconds; 0 for an instant.
        tensor: name of the tensor or group of tensors.
        round: synchronization round.
        nbytes: bytes concerned: for send and recv the whole frame, for encode and merge the body of one.
        peer: the other rank, or None; of a send None is the aggregator.
        detail: anything else worth keeping.
    """

    kind: str
    start: float
    duration: float = 0.0
    tensor: str = ""
    round: int = -1
    nbytes: int = 0
    peer: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class EventStream:
    """A bounded ring of the latest events, and listeners that see each one as it comes. Thread-safe."""

    def __init__(self, capacity: int = 4096) -> None:
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._listeners: list[Callable[[Event], None]] = []
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        self._ring.append(event)
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("A listener of the event stream failed on %s.", event)

    @contextmanager
    def span(self, kind: str, **fields: Any) -> Iterator[None]:
        """Emit one event that lasts as long as the `with` block."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.emit(Event(kind, start, time.monotonic() - start, **fields))

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event from now on; the returned function ends that."""
        with self._lock:
            self._listeners = [*self._listeners, listener]

        def stop() -> None:
            with self._lock:
                self._listeners = [known for known in self._listeners if known is not listener]

        return stop

    def latest(self) -> list[Event]:
        """The events still in the ring, oldest first."""
        return list(self._ring)
