"""The event stream: plain records with a time and a tensor, for metrics, traces and any other listener.

Emitting costs an append to a bounded ring and one call per listener, and never raises into the data path.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

logger = logging.getLogger("gradwire")


class Event(NamedTuple):
    """A record of one event.

    Attributes:
        kind: ``encode``, ``decode``, ``merge``, ``send``, ``recv``, ``submit``, ``done``, ``commit``, ``rollback``,
            ``replica_check``, ``replan``, ``wait`` (of a backward pass that has ended), ``failure``, ``late`` (sent,
            but not counted), or ``norm_jump`` (of the rank `peer`).
        start: Seconds on the monotonic clock.
        duration: Duration in seconds; 0 for an instant.
        tensor: Name of the tensor or fusion group.
        round: Synchronization round.
        nbytes: Bytes of the whole frame for send and recv, and of its body for encode and merge.
        peer: The other rank, or None. For a send, None is the aggregator.
        detail: Any other data.
    """

    kind: str
    start: float
    duration: float = 0.0
    tensor: str = ""
    round: int = -1
    nbytes: int = 0
    peer: int | None = None
    detail: Mapping[str, Any] = MappingProxyType({})

    def as_dict(self) -> dict[str, Any]:
        return self._asdict() | {"detail": dict(self.detail)}


class EventStream:
    """A bounded ring of the latest events, and listeners that get each event at once. Thread-safe."""

    def __init__(self, capacity: int = 4096) -> None:
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._listeners: list[Callable[[Event], None]] = []
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        self.keep(event)
        self.tell(event)

    def keep(self, event: Event) -> None:
        """Add an event to the ring alone."""
        self._ring.append(event)

    def tell(self, event: Event) -> None:
        """Call the listeners alone."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("A listener of the event stream failed on %s.", event)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event from now on, until the returned function is called."""
        with self._lock:
            self._listeners = [*self._listeners, listener]

        def stop() -> None:
            with self._lock:
                self._listeners = [known for known in self._listeners if known is not listener]

        return stop

    def latest(self) -> list[Event]:
        """Return the events in the ring, oldest first."""
        return list(self._ring)
