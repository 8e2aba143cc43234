"""Packets of one worker that are under way where packets can be lost: which to send again, and when the next may go.

A packet waits for the server's word that it has come, is *held* then, and waits for its result. What is overdue in the
first state goes again; in the second a few bytes ask for it (`held.py`).

Source: RFC 5681 for a window that grows by answers and halves by losses.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from gradwire.aggregator.packet import PacketKey
from gradwire.aggregator.polling import ResultPolling
from gradwire.aggregator.round_trip import RoundTrip, Waiting

FIRST_WIDTH = 16
LEAST_WIDTH = 2


class Due(NamedTuple):
    """What a timer has brought: contributions to send again now, and results to ask for."""

    again: list[PacketKey]
    ask: list[PacketKey]


class Window:
    """The packets under way.

    Args:
        most: the widest that it becomes, in packets.
        rng: of the timers' jitter.
    """

    def __init__(self, most: int, rng: random.Random) -> None:
        self._most = most
        self._trip = RoundTrip()
        self._sent, self._held = Waiting(rng), ResultPolling(rng)
        self._lost: dict[PacketKey, None] = {}
        self._twice: dict[PacketKey, float] = {}  # first sent when: their answers do not tell the round trip
        self._width: float = min(FIRST_WIDTH, max(LEAST_WIDTH, most // 8))
        self._threshold: float = most
        self._narrowed = -1.0

    @property
    def room(self) -> bool:
        """Whether another packet may go."""
        return len(self._sent) < self._width

    def send(self, key: PacketKey, now: float) -> None:
        """A contribution goes out for the first time."""
        self._sent.add(key, now)

    def send_again(self, key: PacketKey, now: float) -> None:
        """A contribution goes out again."""
        self._held.drop(key)
        self._lost.pop(key, None)
        self._sent.add(key, now)

    def hold(self, key: PacketKey, now: float) -> None:
        """The server has it, and waits for others."""
        self._arrived(key, now)
        self._held.add(key, now)

    def finish(self, key: PacketKey, now: float) -> None:
        """Its result has come."""
        self._arrived(key, now)
        self._held.finish(key, now)
        self._twice.pop(key, None)

    def lose(self, key: PacketKey) -> None:
        """It is gone, and goes again when there is room."""
        self.recall(key)
        self._lost[key] = None

    def recall(self, key: PacketKey) -> bool:
        """Forget that it is out; False where it is about to be sent again anyway."""
        return self._sent.drop(key) or self._held.drop(key)

    def due(self, now: float) -> Due:
        """What the timers bring."""
        timeout = self._trip.timeout
        lost = self._sent.overdue(now, timeout)
        probes = [] if lost else self._sent.probe(now, timeout)
        for key, since in lost + probes:
            self._twice.setdefault(key, since)
            self._narrow(since, now)
        self._lost.update((key, None) for key, _ in lost)
        again = [key for key, _ in probes]
        while self._lost and len(self._sent) + len(again) < self._width:
            again.append(next(iter(self._lost)))
            del self._lost[again[-1]]
        return Due(again, self._held.due(now, timeout))

    def deadline(self) -> float | None:
        """When `due` may have something; None while nothing is out."""
        timeout = self._trip.timeout
        found = [self._sent.deadline(timeout), self._held.deadline(timeout)]
        if self._lost and self.room:
            found.append(0.0)
        return min((each for each in found if each is not None), default=None)

    def _arrived(self, key: PacketKey, now: float) -> None:
        """The server has it."""
        first = self._twice.get(key)
        since = self._sent.answered(key, now, first)
        self._lost.pop(key, None)
        if since is None:
            return
        if first is None:
            self._trip.measured(now - since)
        self._width = min(self._most, self._width + (1 if self._width < self._threshold else 1 / self._width))

    def _narrow(self, since: float, now: float) -> None:
        """Halve the width, once for all packets that were out together."""
        if since > self._narrowed:
            self._width = self._threshold = max(LEAST_WIDTH, self._width / 2)
            self._narrowed = now
