"""A network of datagrams in virtual time that loses, repeats, reorders, cuts and damages them, by a seed.

Guarantees: the same seed and the same calls give the same schedule; what was done to datagrams is counted, so that
what the ends count can be held against it. No threads, no sockets, no clock.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Faults:
    """What happens to datagrams: a probability each, independent.

    Attributes:
        loss: never arrives.
        duplicate: arrives twice.
        truncate: arrives without its end.
        corrupt: arrives with a bit flipped.
        delay: seconds that each takes.
        spread: seconds that it may take in addition, each of its own: so they overtake each other.
        rate: bytes a second that a receiver takes; None for any number.
        buffer_bytes: that may wait for a receiver; what comes on top of them is lost.
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
    """Datagrams under way.

    Args:
        faults: may be replaced at any time.
        seed: of all that is random.

    Attributes:
        now: virtual time, in seconds.
        done: what was done: "sent", "lost", "overflowed", "duplicated", "truncated", "corrupted".
        delivered: what has arrived, by receiver.
        damaged: of that, truncated or corrupted, by receiver.
    """

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults = faults
        self.now = 0.0
        self.done: Counter[str] = Counter()
        self.delivered: Counter[int] = Counter()
        self.damaged: Counter[int] = Counter()
        self._rng = random.Random(seed)
        self._under_way: list[DatagramArrival] = []
        self._free_at: dict[int, float] = {}
        self._order = 0

    def send(self, receiver: int, datagram: bytes) -> None:
        """Put a datagram on its way."""
        self.done["sent"] += 1
        if self._rng.random() < self.faults.loss:
            self.done["lost"] += 1
            return
        copies = 1 + (self._rng.random() < self.faults.duplicate)
        self.done["duplicated"] += copies - 1
        for _ in range(copies):
            self._put(receiver, bytes(datagram))

    def next_arrival(self) -> float | None:
        """When the next datagram arrives."""
        return self._under_way[0].time if self._under_way else None

    def receive(self) -> DatagramArrival:
        """Take the next datagram; time goes on to its arrival."""
        arrival = heapq.heappop(self._under_way)
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
        heapq.heappush(self._under_way, DatagramArrival(time, self._order, receiver, data, data is not datagram))
