"""Timers of a connection, without I/O: when to send a heartbeat, and when a peer counts as silent.

Any byte counts as a sign of life, so heartbeats flow only on idle connections. They are a quarter of the timeout apart:
up to three may be late. Time in which this process itself was held up is no silence of its peers: where all processes
of a machine are suspended together, nobody could speak.
"""

from __future__ import annotations

from datetime import timedelta

HEARTBEATS_PER_TIMEOUT = 4
STALL_TIMEOUT = timedelta(minutes=30)
"""Default of every `stall_timeout`.

Two limits bound every wait for another process. `timeout` bounds silence: a process that is killed, frozen or cut off
sends no heartbeats. `stall_timeout` bounds how long a process that does send heartbeats may take to deliver what others
wait for. It may evaluate, write a checkpoint or compile in this time. See docs/decisions/0009-liveness-is-not-progress.
"""


class Liveness:
    """Timers of one connection. Times are seconds on the caller's monotonic clock.

    Args:
        timeout: Longest silence of the peer.
        now: Time at which the connection began.
        heartbeat: Longest pause between heartbeats, if the peer's timeout may be shorter than this end's.
    """

    def __init__(self, timeout: timedelta, now: float, heartbeat: timedelta | None = None) -> None:
        self._timeout = timeout.total_seconds()
        if self._timeout <= 0:
            raise ValueError(f"{timeout} is not a positive timeout.")
        self._interval = self._timeout / HEARTBEATS_PER_TIMEOUT
        if heartbeat is not None:
            self._interval = min(self._interval, heartbeat.total_seconds())
        self._heard_at = now
        self._sent_at = now

    def heard(self, now: float) -> None:
        """Note that bytes have come from the peer."""
        self._heard_at = now

    def held_up(self, late: float) -> None:
        """Note that this process looks at its connections later than it meant to, by this many seconds."""
        if late > self._interval:
            self._heard_at += late

    def sent(self, now: float) -> None:
        """Note that bytes have gone to the peer."""
        self._sent_at = now

    def heartbeat_due(self, now: float) -> bool:
        """Whether it is time to send a heartbeat."""
        return now >= self._sent_at + self._interval

    def silent(self, now: float) -> bool:
        """Whether the peer has been silent for the whole timeout.

        Pass a time taken *before* the connection was last read. Otherwise a process that was paused blames peers whose
        bytes it has not read yet.
        """
        return now >= self._heard_at + self._timeout

    def silent_seconds(self, now: float) -> float:
        """Time since bytes last came from the peer."""
        return max(0.0, now - self._heard_at)

    def next_deadline(self) -> float:
        """Return the earliest time at which `heartbeat_due` or `silent` may turn true."""
        return min(self._sent_at + self._interval, self._heard_at + self._timeout)
