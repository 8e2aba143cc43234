"""Retransmission over UDP: which packets a worker sends again, which results it asks for, and how many are in flight.

A packet in flight waits for the server's word that it has arrived (HELD), then for its result. In the first state an
overdue packet is sent again. In the second the worker asks for the result with a few bytes (`ResultPolling`).

Source: RFC 6298 for the round-trip estimate. RFC 8985 for the rule that an overdue packet is lost only if something
that was sent no earlier has been answered. RFC 5681 for a window that grows with answers and halves on loss.
Differences: a timeout is at least `GRAIN_SECONDS`, not a second, above the round trip. If nothing is answered at all,
one packet is sent as a probe, at growing intervals, and the others only after the probe's answer and another timeout.
So a sudden longer round trip costs a few packets and no storm.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from gradwire.aggregator.packet import PacketKey

GRAIN_SECONDS = 0.001
"""Least margin of a timeout above the round trip: scheduling delay of a busy receiver."""
FIRST_SECONDS = 0.2
MAX_SECONDS = 2.0
JITTER = 0.25
FIRST_WIDTH = 16
MIN_WIDTH = 2
_MAX_ASKED = 64
_MAX_DOUBLINGS = 16


class RoundTrip:
    """Round-trip estimate."""

    def __init__(self) -> None:
        self._smoothed: float | None = None
        self._deviation = 0.0

    @property
    def timeout(self) -> float:
        """Seconds after which an answer is overdue."""
        if self._smoothed is None:
            return FIRST_SECONDS
        return min(MAX_SECONDS, self._smoothed + max(GRAIN_SECONDS, 4 * self._deviation))

    def measured(self, seconds: float) -> None:
        """Add the round trip of a packet that was sent once."""
        if self._smoothed is None:
            self._smoothed, self._deviation = seconds, seconds / 2
        else:
            self._deviation += (abs(seconds - self._smoothed) - self._deviation) / 4
            self._smoothed += (seconds - self._smoothed) / 8


class InFlight:
    """Packets that wait for the same kind of answer, in the order in which they began to wait.

    Args:
        rng: Random source of the jitter, which spreads the probes of many workers.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._since: dict[PacketKey, float] = {}
        self._last_answered = -1.0  # latest sending that was answered
        # Latest sending whose answer may be to an earlier sending of the same packet, and when such answers began.
        self._doubtful: tuple[float, float] | None = None
        self._probed = -1.0
        self._doublings = 0
        self._jitter = 1.0

    def __len__(self) -> int:
        return len(self._since)

    def add(self, key: PacketKey, now: float) -> None:
        """Begin to wait for a packet's answer."""
        self._since.pop(key, None)
        self._since[key] = now

    def answered(self, key: PacketKey, now: float, first: float | None = None) -> float | None:
        """End the wait of a packet, and return since when it waited; None if it did not.

        `first` is when the packet was first sent, if more than once. The answer may then be to the first sending. So it
        does not reset the probe interval (Karn and Partridge 1987), and packets sent since then count as lost only if
        they are still unanswered a timeout later.
        """
        since = self._since.pop(key, None)
        if since is None:
            return None
        if first is None:
            self._doublings = 0
        else:
            self._doubtful = since, now if self._doubtful is None else self._doubtful[1]
        self._last_answered = max(self._last_answered, since if first is None else first)
        return since

    def drop(self, key: PacketKey) -> bool:
        """Forget a packet without conclusions about others, and return whether it was there."""
        return self._since.pop(key, None) is not None

    def since(self, key: PacketKey) -> float | None:
        """Return since when a packet waits; None if it does not."""
        return self._since.get(key)

    def overdue(self, now: float, timeout: float) -> list[tuple[PacketKey, float]]:
        """Remove and return the lost packets, each with the time since when it waited."""
        if self._doubtful is not None and self._doubtful[1] + timeout <= now:
            self._last_answered, self._doubtful = max(self._last_answered, self._doubtful[0]), None
        lost = []
        for key, since in self._since.items():
            if since > self._last_answered or since + timeout > now:
                break
            lost.append((key, since))
        for key, _ in lost:
            del self._since[key]
        return lost

    def probe(self, now: float, timeout: float) -> list[tuple[PacketKey, float]]:
        """Remove and return the packet that has waited longest, if a probe is due."""
        if not self._since or now < self._probe_at(timeout):
            return []
        key, since = next(iter(self._since.items()))
        del self._since[key]
        self._probed = now
        self._doublings = min(self._doublings + 1, _MAX_DOUBLINGS)
        self._jitter = self._rng.uniform(1, 1 + JITTER)
        return [(key, since)]

    def deadline(self, timeout: float) -> float | None:
        """Return when `overdue` or `probe` may have something."""
        for since in self._since.values():
            if since <= self._last_answered:
                return since + timeout
            if self._doubtful is not None and since <= self._doubtful[0]:
                return min(self._probe_at(timeout), max(since, self._doubtful[1]) + timeout)
            return self._probe_at(timeout)
        return None

    def _probe_at(self, timeout: float) -> float:
        oldest = next(iter(self._since.values()))
        return max(oldest, self._probed) + min(MAX_SECONDS, timeout * (1 << self._doublings)) * self._jitter


class ResultPolling:
    """Contributions that the server holds, and whose results it owes: which to ask for, and when.

    The result of one packet says nothing about another, which may wait for another worker. So the worker asks for one
    at a time, once that has waited several times as long as others had to, and at growing intervals while the server
    answers that it still waits. If the answer is a result, results were lost: then the worker asks for more and more of
    those that have waited as long.

    Args:
        rng: Random source of the jitter.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._since: dict[PacketKey, float] = {}  # not asked for; when the server last said that it holds them
        self._asked = InFlight(rng)
        self._asked_first: dict[PacketKey, float] = {}  # asked for more than once
        self._first: dict[PacketKey, float] = {}  # when the server first said that it holds them
        self._wait = RoundTrip()
        self._width = 1
        self._doublings = 0
        self._refused = -1.0  # when the server last answered that it still waits
        self._jitter = 1.0

    def add(self, key: PacketKey, now: float) -> None:
        """Note that the server holds a packet."""
        self._first.setdefault(key, now)
        self._since.pop(key, None)
        self._since[key] = now
        if self._was_asked(key, now):
            self._width, self._refused = 1, now
            self._doublings = min(self._doublings + 1, _MAX_DOUBLINGS)

    def finish(self, key: PacketKey, now: float) -> None:
        """Note that the result has arrived."""
        first = self._first.pop(key, None)
        self._since.pop(key, None)
        if self._was_asked(key, now):
            self._width, self._doublings, self._refused = min(self._width + 1, _MAX_ASKED), 0, -1.0
        elif first is not None:
            self._wait.measured(now - first)
            self._doublings = 0

    def drop(self, key: PacketKey) -> bool:
        """Forget a packet, and return whether it was there."""
        self._asked.drop(key)
        self._asked_first.pop(key, None)
        self._since.pop(key, None)
        return self._first.pop(key, None) is not None

    def due(self, now: float, timeout: float) -> list[PacketKey]:
        """Return the results to ask for now, if an answer takes at most `timeout`."""
        lost = self._asked.overdue(now, timeout) or self._asked.probe(now, timeout)
        for key, since in lost:
            self._asked_first.setdefault(key, since)
            self._width = 1
        keys = [key for key, _ in lost]
        while self._since and len(self._asked) + len(keys) < self._width and self._due_at(timeout) <= now:
            keys.append(next(iter(self._since)))
            del self._since[keys[-1]]
            self._jitter = self._rng.uniform(1, 1 + JITTER)
        for key in keys:
            self._asked.add(key, now)
        return keys

    def deadline(self, timeout: float) -> float | None:
        """Return when `due` may have something; None if nothing is held."""
        answer = self._asked.deadline(timeout)
        if not self._since or len(self._asked) >= self._width:
            return answer
        return self._due_at(timeout) if answer is None else min(answer, self._due_at(timeout))

    def _was_asked(self, key: PacketKey, now: float) -> bool:
        return self._asked.answered(key, now, self._asked_first.pop(key, None)) is not None

    def _due_at(self, timeout: float) -> float:
        patience = (timeout + self._wait.timeout) * (1 << self._doublings) * self._jitter
        return max(next(iter(self._since.values())), self._refused) + min(MAX_SECONDS, patience)


class Due(NamedTuple):
    """What the timers ask for: contributions to send again now, and results to ask for."""

    again: list[PacketKey]
    ask: list[PacketKey]


class Window:
    """Congestion window of one worker.

    Args:
        max_width: Largest width, in packets.
        rng: Random source of the timers' jitter.
    """

    def __init__(self, max_width: int, rng: random.Random) -> None:
        self._max_width = max_width
        self._trip = RoundTrip()
        self._sent, self._held = InFlight(rng), ResultPolling(rng)
        self._lost: dict[PacketKey, None] = {}
        self._sent_first: dict[
            PacketKey, float
        ] = {}  # sent more than once, so that an answer does not time a round trip
        self._width: float = min(FIRST_WIDTH, max(MIN_WIDTH, max_width // 8))
        self._threshold: float = max_width
        self._narrowed = -1.0

    @property
    def has_room(self) -> bool:
        """Whether another packet may be sent."""
        return len(self._sent) < self._width

    def send(self, key: PacketKey, now: float) -> None:
        """Note the first sending of a contribution."""
        self._sent.add(key, now)

    def send_again(self, key: PacketKey, now: float) -> None:
        """Note another sending of a contribution."""
        self._held.drop(key)
        self._lost.pop(key, None)
        self._sent.add(key, now)

    def hold(self, key: PacketKey, now: float) -> None:
        """Note that the server has a contribution and waits for others."""
        self._arrived(key, now)
        self._held.add(key, now)

    def finish(self, key: PacketKey, now: float) -> None:
        """Note that a result has arrived."""
        self._arrived(key, now)
        self._held.finish(key, now)
        self._sent_first.pop(key, None)

    def lose(self, key: PacketKey) -> None:
        """Give a packet up as lost. It is sent again when there is room."""
        self.recall(key)
        self._lost[key] = None

    def recall(self, key: PacketKey) -> bool:
        """Forget that a packet is in flight; False if it is about to be sent again anyway."""
        return self._sent.drop(key) or self._held.drop(key)

    def give_up(self, key: PacketKey, now: float) -> None:
        """Forget a packet whose result is no longer wanted. It is lost if the server has not said that it holds it."""
        since = self._sent.since(key)
        self.recall(key)
        self._lost.pop(key, None)
        self._sent_first.pop(key, None)
        if since is not None:
            self._narrow(since, now)

    def due(self, now: float) -> Due:
        """Return what the timers ask for."""
        timeout = self._trip.timeout
        lost = self._sent.overdue(now, timeout)
        probes = [] if lost else self._sent.probe(now, timeout)
        for key, since in lost + probes:
            self._sent_first.setdefault(key, since)
            self._narrow(since, now)
        self._lost.update((key, None) for key, _ in lost)
        again = [key for key, _ in probes]
        while self._lost and len(self._sent) + len(again) < self._width:
            again.append(next(iter(self._lost)))
            del self._lost[again[-1]]
        return Due(again, self._held.due(now, timeout))

    def deadline(self) -> float | None:
        """Return when `due` may have something; None if nothing is in flight."""
        timeout = self._trip.timeout
        times = [self._sent.deadline(timeout), self._held.deadline(timeout)]
        if self._lost and self.has_room:
            times.append(0.0)
        return min((time for time in times if time is not None), default=None)

    def _arrived(self, key: PacketKey, now: float) -> None:
        first = self._sent_first.get(key)
        since = self._sent.answered(key, now, first)
        self._lost.pop(key, None)
        if since is None:
            return
        if first is None:
            self._trip.measured(now - since)
        self._width = min(self._max_width, self._width + (1 if self._width < self._threshold else 1 / self._width))

    def _narrow(self, since: float, now: float) -> None:
        """Halve the width, once for all packets that were in flight together."""
        if since > self._narrowed:
            self._width = self._threshold = max(MIN_WIDTH, self._width / 2)
            self._narrowed = now
