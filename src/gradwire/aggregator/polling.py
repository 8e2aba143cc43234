"""Packets that the server has and whose results it owes: which to ask for, and when.

A result of one says nothing of another, which may wait for another worker. So one at a time is asked for, once it has
waited for several times what others have; and ever more rarely while the server says that it still waits. An answer
that is a result says that results were lost: then ever more of those that have waited as long are asked for at once.
"""

from __future__ import annotations

import random

from gradwire.aggregator.packet import PacketKey
from gradwire.aggregator.round_trip import JITTER, LONGEST_SECONDS, RoundTrip, Waiting

_MOST_ASKED = 64


class ResultPolling:
    """What one worker has been told is held.

    Args:
        rng: of the timers' jitter.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._since: dict[PacketKey, float] = {}  # not asked for: since the server's last word of it, in that order
        self._asked = Waiting(rng)
        self._asked_first: dict[PacketKey, float] = {}  # of those that were asked for again and have not been answered
        self._first: dict[PacketKey, float] = {}  # since the server's first word of it
        self._wait = RoundTrip()
        self._abreast = 1
        self._doubled = 0
        self._refused = -1.0  # when the server has last said that it waits itself
        self._jitter = 1.0

    def add(self, key: PacketKey, now: float) -> None:
        """The server says that it has a packet, and waits for other workers."""
        self._first.setdefault(key, now)
        self._since.pop(key, None)
        self._since[key] = now
        if self._answered(key, now):
            self._abreast, self._refused = 1, now
            self._doubled = min(self._doubled + 1, 16)

    def finish(self, key: PacketKey, now: float) -> None:
        """Its result has come."""
        first = self._first.pop(key, None)
        self._since.pop(key, None)
        if self._answered(key, now):
            self._abreast, self._doubled, self._refused = min(self._abreast + 1, _MOST_ASKED), 0, -1.0
        elif first is not None:
            self._wait.measured(now - first)
            self._doubled = 0

    def drop(self, key: PacketKey) -> bool:
        """Forget it; whether it was there."""
        self._asked.drop(key)
        self._asked_first.pop(key, None)
        self._since.pop(key, None)
        return self._first.pop(key, None) is not None

    def due(self, now: float, timeout: float) -> list[PacketKey]:
        """What to ask for now, where an answer takes `timeout` at most."""
        lost = self._asked.overdue(now, timeout) or self._asked.probe(now, timeout)
        for key, since in lost:
            self._asked_first.setdefault(key, since)
            self._abreast = 1
        keys = [key for key, _ in lost]
        while self._since and len(self._asked) + len(keys) < self._abreast and self._due_at(timeout) <= now:
            keys.append(next(iter(self._since)))
            del self._since[keys[-1]]
            self._jitter = self._rng.uniform(1, 1 + JITTER)
        for key in keys:
            self._asked.add(key, now)
        return keys

    def deadline(self, timeout: float) -> float | None:
        """When `due` may have something; None while nothing is held."""
        answer = self._asked.deadline(timeout)
        if not self._since or len(self._asked) >= self._abreast:
            return answer
        return self._due_at(timeout) if answer is None else min(answer, self._due_at(timeout))

    def _answered(self, key: PacketKey, now: float) -> bool:
        """Whether it was asked for."""
        return self._asked.answered(key, now, self._asked_first.pop(key, None)) is not None

    def _due_at(self, timeout: float) -> float:
        patience = (timeout + self._wait.timeout) * (1 << self._doubled) * self._jitter
        return max(next(iter(self._since.values())), self._refused) + min(LONGEST_SECONDS, patience)
