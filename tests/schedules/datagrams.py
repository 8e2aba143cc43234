"""A seeded datagram network in virtual time that loses, duplicates, reorders, truncates and corrupts datagrams.

The same seed and the same calls give the same schedule. Faults are counted, so that tests can compare them with the
counters of both ends. No threads, no sockets, no clock.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Faults:
    """Independent probabilities of faults, and the speed of the network.

    Attributes:
        loss: Probability that a datagram never arrives.
        duplicate: Probability that it arrives twice.
        truncate: Probability that it arrives without its end.
        corrupt: Probability that it arrives with a flipped bit.
        delay: Seconds that every datagram takes.
        spread: Most additional seconds, drawn per datagram, so that datagrams overtake each other.
        rate: Bytes per second that a receiver takes; None for no limit.
        buffer_bytes: Bytes that may wait for a receiver. Further datagrams are lost.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    truncate: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0005
    spread: float = 0.0
    rate: float | None = None
    buffer_bytes: int = 1 << 20


class DatagramArrival(NamedTuple):
    """A datagram at its receiver."""

    time: float
    order: int
    receiver: int
    data: bytes
    damaged: bool


class DatagramNetwork:
    """Datagrams in flight.

    Args:
        faults: Faults of the network; may be replaced at any time.
        seed: Seed of everything random.

    Attributes:
        now: Virtual time in seconds.
        done: Counts of "sent", "lost", "overflowed", "duplicated", "truncated" and "corrupted".
        delivered: Number of datagrams that arrived, by receiver.
        damaged: Number of those that were truncated or corrupted, by receiver.
    """

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults = faults
        self.now = 0.0
        self.done: Counter[str] = Counter()
        self.delivered: Counter[int] = Counter()
        self.damaged: Counter[int] = Counter()
        self._rng = random.Random(seed)
        self._in_flight: list[DatagramArrival] = []
        self._free_at: dict[int, float] = {}
        self._order = 0

    def send(self, receiver: int, datagram: bytes) -> None:
        """Send a datagram."""
        self.done["sent"] += 1
        if self._rng.random() < self.faults.loss:
            self.done["lost"] += 1
            return
        copies = 1 + (self._rng.random() < self.faults.duplicate)
        self.done["duplicated"] += copies - 1
        for _ in range(copies):
            self._put(receiver, bytes(datagram))

    def next_arrival(self) -> float | None:
        """Time of the next arrival; None if nothing is in flight."""
        return self._in_flight[0].time if self._in_flight else None

    def receive(self) -> DatagramArrival:
        """Receive the next datagram and advance the time to its arrival."""
        arrival = heapq.heappop(self._in_flight)
        self.now = max(self.now, arrival.time)
        self.delivered[arrival.receiver] += 1
        self.damaged[arrival.receiver] += arrival.damaged
        return arrival

    def _damage(self, datagram: bytes) -> bytes:
        if self._rng.random() < self.faults.truncate:
            self.done["truncated"] += 1
            return datagram[: self._rng.randrange(len(datagram))]
        if self._rng.random() < self.faults.corrupt:
            self.done["corrupted"] += 1
            data = bytearray(datagram)
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
            return bytes(data)
        return datagram

    def _put(self, receiver: int, datagram: bytes) -> None:
        time = self.now + self.faults.delay + self._rng.random() * self.faults.spread
        if self.faults.rate is not None:
            begins = max(time, self._free_at.get(receiver, 0.0))
            if (begins - time) * self.faults.rate > self.faults.buffer_bytes:
                self.done["overflowed"] += 1
                return
            time = self._free_at[receiver] = begins + len(datagram) / self.faults.rate
        data = self._damage(datagram)
        self._order += 1
        heapq.heappush(self._in_flight, DatagramArrival(time, self._order, receiver, data, data is not datagram))
