"""When a packet counts as lost: an estimate of the round trip, and packets that wait for an answer.

Source: RFC 6298 for the estimate; RFC 8985 for the rule that what has waited too long is lost only if something that
was sent no earlier has been answered. Differences: the least timeout is `GRAIN_SECONDS` above the round trip and not a
second; where nothing has been answered at all, one packet goes out as a probe, ever more rarely, and the others only
when it is answered, and a timeout has gone by in which they were not: so a round trip that becomes much longer costs a
few packets and no storm.
"""

from __future__ import annotations

import random

from gradwire.aggregator.packet import PacketKey

GRAIN_SECONDS = 0.001
"""By how much a timeout is above the round trip at least: what a busy receiver's scheduler takes."""
FIRST_SECONDS = 0.2
LONGEST_SECONDS = 2.0
JITTER = 0.25


class RoundTrip:
    """The estimate of one end."""

    def __init__(self) -> None:
        self._smoothed: float | None = None
        self._deviation = 0.0

    @property
    def timeout(self) -> float:
        """Seconds after which an answer is overdue."""
        if self._smoothed is None:
            return FIRST_SECONDS
        return min(LONGEST_SECONDS, self._smoothed + max(GRAIN_SECONDS, 4 * self._deviation))

    def measured(self, seconds: float) -> None:
        """A packet that was sent once has been answered after so long."""
        if self._smoothed is None:
            self._smoothed, self._deviation = seconds, seconds / 2
        else:
            self._deviation += (abs(seconds - self._smoothed) - self._deviation) / 4
            self._smoothed += (seconds - self._smoothed) / 8


class Waiting:
    """Packets that wait for the same kind of answer, in the order in which they began to.

    Args:
        rng: of the jitter, which keeps the probes of many workers apart.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._since: dict[PacketKey, float] = {}
        self._sign = -1.0  # when the latest of those that were answered began to wait
        self._doubtful: tuple[float, float] | None = None  # the same of answers that may be to a first sending; and now
        self._probed = -1.0
        self._doubled = 0
        self._jitter = 1.0

    def __len__(self) -> int:
        return len(self._since)

    def add(self, key: PacketKey, now: float) -> None:
        """It waits from now on."""
        self._since.pop(key, None)
        self._since[key] = now

    def answered(self, key: PacketKey, now: float, first: float | None = None) -> float | None:
        """It waits no more: since when it has; None where it did not wait.

        `first` is when it was first sent, if more than once. The answer may be to that, and is no reason to probe more
        often then (Karn and Partridge 1987); and a sign of what was sent since only where, a timeout later, that has
        still not been answered.
        """
        since = self._since.pop(key, None)
        if since is None:
            return None
        if first is None:
            self._doubled = 0
        else:
            self._doubtful = since, now if self._doubtful is None else self._doubtful[1]
        self._sign = max(self._sign, since if first is None else first)
        return since

    def drop(self, key: PacketKey) -> bool:
        """Forget it, without a conclusion about others; whether it was there."""
        return self._since.pop(key, None) is not None

    def overdue(self, now: float, timeout: float) -> list[tuple[PacketKey, float]]:
        """Forget and return those that are lost, and since when they waited."""
        if self._doubtful is not None and self._doubtful[1] + timeout <= now:
            self._sign, self._doubtful = max(self._sign, self._doubtful[0]), None
        lost = []
        for key, since in self._since.items():
            if since > self._sign or since + timeout > now:
                break
            lost.append((key, since))
        for key, _ in lost:
            del self._since[key]
        return lost

    def probe(self, now: float, timeout: float) -> list[tuple[PacketKey, float]]:
        """The same of the one that has waited longest, where it is time for a sign of life."""
        if not self._since or now < self._probe_at(timeout):
            return []
        key, since = next(iter(self._since.items()))
        del self._since[key]
        self._probed = now
        self._doubled = min(self._doubled + 1, 16)
        self._jitter = self._rng.uniform(1, 1 + JITTER)
        return [(key, since)]

    def deadline(self, timeout: float) -> float | None:
        """When `overdue` or `probe` may have something."""
        for since in self._since.values():
            if since <= self._sign:
                return since + timeout
            if self._doubtful is not None and since <= self._doubtful[0]:
                return min(self._probe_at(timeout), max(since, self._doubtful[1]) + timeout)
            return self._probe_at(timeout)
        return None

    def _probe_at(self, timeout: float) -> float:
        oldest = next(iter(self._since.values()))
        return max(oldest, self._probed) + min(LONGEST_SECONDS, timeout * (1 << self._doubled)) * self._jitter
