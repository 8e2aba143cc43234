"""Signs of life between two ranks, sans-IO: when to send a heartbeat, when to give a peer up.

Any byte counts as a sign of life, so heartbeats flow only where nothing else does. A quarter of the deadline
between heartbeats leaves room for three that get lost in a stall.
"""

from __future__ import annotations

from datetime import timedelta

HEARTBEATS_PER_DEADLINE = 4


class Liveness:
    """Timers of one connection. Times are seconds on one monotonic clock, handed in by the caller.

    Args:
        timeout: how long a peer may be silent.
        now: the time at which the connection began.
        heartbeat: how often this end says that it is alive, where the other end may be less patient than this one.
    """

    def __init__(self, timeout: timedelta, now: float, heartbeat: timedelta | None = None) -> None:
        self._timeout = timeout.total_seconds()
        if self._timeout <= 0:
            raise ValueError(f"Expected a positive timeout, got {timeout}.")
        self._interval = self._timeout / HEARTBEATS_PER_DEADLINE
        if heartbeat is not None:
            self._interval = min(self._interval, heartbeat.total_seconds())
        self._heard_at = now
        self._sent_at = now

    def heard(self, now: float) -> None:
        """Note that bytes came from the peer."""
        self._heard_at = now

    def sent(self, now: float) -> None:
        """Note that bytes went to the peer."""
        self._sent_at = now

    def heartbeat_due(self, now: float) -> bool:
        """Whether it is time to say that this rank is alive."""
        return now >= self._sent_at + self._interval

    def silent(self, now: float) -> bool:
        """Whether the peer has been silent for the whole deadline.

        Ask with a time taken *before* the last look at the connection: a process that was paused would
        otherwise blame peers whose bytes it has only not read yet.
        """
        return now >= self._heard_at + self._timeout

    def next_deadline(self) -> float:
        """Return the earliest time at which `heartbeat_due` or `silent` may turn true."""
        return min(self._sent_at + self._interval, self._heard_at + self._timeout)
