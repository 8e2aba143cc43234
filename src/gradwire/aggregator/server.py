"""The aggregation server, sans-IO: packets in, packets out.

Guarantees: each worker's contribution to a round of a packet is added exactly once, whatever is lost, repeated,
reordered or damaged on the way; all workers get the same result, which says who is in it; a result is kept until every
worker has been heard in a later round; a packet of another round, or of another life of the server, changes nothing.
What does not fit the terms is refused before anything is allocated.

Source: THC (Li et al. 2024), pseudocode 1 (`AggregatorStateMachine._aggregate`), and section 6 for answering without
stragglers.
Differences: a bitmap in place of a count, so that a packet that comes twice is added once; results are stored, so that
who was late or lost a reply gets the same one; the number of workers is agreed, not taken from packets; a round that is
under way is not thrown away for a later one; a straggler is left out `max_misses` times in a row at most.

A server that was killed comes back with nothing. Workers send again what has not been answered; what one of them still
lacks and others have, the server asks those for (WANTED): a slot begins with the lowest round that anybody needs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradwire.aggregator.counters import PacketCounters
from gradwire.aggregator.packet import (
    MAX_ROUND,
    PACKET_HEADER_BYTES,
    SERVER,
    Packet,
    PacketKey,
    PacketKind,
    keys_to,
    pack,
    unpack,
)
from gradwire.aggregator.session import SessionConfig
from gradwire.aggregator.slot import AggregationSlot
from gradwire.core.errors import FrameError

EVERYONE = -1
_MOST_KEYS = 64  # in a HELD: it fits a packet of the Ethernet
_NO_KEY = PacketKey(0, 0, 0)


class PacketToSend(NamedTuple):
    """A packet to send.

    Attributes:
        worker: to whom; or `EVERYONE`.
        packet: not to be changed.
    """

    worker: int
    packet: np.ndarray


class UnansweredPacket(NamedTuple):
    """A packet that has not been answered."""

    since: float
    key: PacketKey
    missing: list[int]


class AggregatorStateMachine:
    """The server's end of one job.

    Args:
        terms: what was agreed.
        epoch: drawn at random for each life of a server.
        acknowledges: whether workers are told that a contribution has come: where packets can be lost.

    Attributes:
        largest: bytes of the longest packet that may come.
        resumed: whether a worker has been answered by an earlier life of the server.
        counters: what has happened so far.
    """

    def __init__(self, terms: SessionConfig, epoch: int, *, acknowledges: bool = True) -> None:
        self.terms = terms
        self.epoch = epoch
        self.resumed = False
        self.counters = PacketCounters()
        self._acknowledges = acknowledges
        self._slots: dict[tuple[int, int], AggregationSlot] = {}
        self._open: dict[tuple[int, int], float] = {}  # since when, in that order
        self._held: dict[int, list[PacketKey]] = {}
        self._sizes = [self._packet_sizes(stream) for stream in range(len(terms.streams))]
        self.largest = PACKET_HEADER_BYTES + max((whole for _, whole, _ in self._sizes), default=0)

    def receive(
        self, datagram: bytes | memoryview | np.ndarray, now: float, sender: int | None = None
    ) -> list[PacketToSend]:
        """Take what has come, and return what is to be sent.

        Args:
            datagram: may be used again after the call.
            now: seconds on the caller's monotonic clock.
            sender: who sends it, where that has been proven otherwise.

        Raises:
            FrameError: it is not a packet, or not one that this sender may send. Nothing has changed.
        """
        self.counters.received += 1
        packet = self._admit(datagram, sender)
        if packet.epoch != self.epoch:
            self.counters.stale += 1
            return []
        messages = self._answer(packet) if packet.kind is PacketKind.ASK else self._aggregate(packet, now)
        self.counters.sent += len(messages)
        return messages

    def flush(self) -> list[PacketToSend]:
        """Acknowledge what has come since the last flush, a packet a worker."""
        held, self._held = self._held, {}
        messages = [
            PacketToSend(
                worker, pack(PacketKind.HELD, _NO_KEY, SERVER, self.epoch, keys_to(keys[start : start + _MOST_KEYS]))
            )
            for worker, keys in held.items()
            for start in range(0, len(keys), _MOST_KEYS)
        ]
        self.counters.sent += len(messages)
        return messages

    def oldest_open(self) -> UnansweredPacket | None:
        """What has waited longest for contributions."""
        for place, since in self._open.items():
            slot = self._slots[place]
            return UnansweredPacket(since, PacketKey(slot.expected_round, *place), slot.missing)
        return None

    # -- pseudocode 1 ----------------------------------------------------------------------------------------

    def _aggregate(self, packet: Packet, now: float) -> list[PacketToSend]:
        """One contribution. The numbers are the lines of pseudocode 1."""
        slot = self._slot(packet.key)
        if packet.key.round < slot.expected_round:  # 1
            if not self._lacking(slot):
                return self._notify_straggler(slot, packet)  # 2
            self._go_back(slot, packet.key, now)
        elif packet.key.round > slot.expected_round:  # 6
            if not slot.done:
                return self._too_early(slot, packet)
            self._begin(slot, packet.key, now)  # 7, 8
        if slot.last_heard[packet.worker] == packet.key.round:
            return self._repeated(slot, packet)
        if slot.done:
            return self._notify_straggler(slot, packet)
        self.counters.taken += 1
        slot.hear(packet)  # 5, 10, 11
        if not self._complete(slot):  # 12
            self._hold(packet)  # 15
            first = slot.heard.bit_count() == 1
            return self._want(slot, packet.key, slot.missing) if first and self._lacking(slot) else []
        del self._open[packet.key[1:]]
        ahead, slot.ahead = slot.ahead, {}
        later = [self._wanted(worker, packet.key._replace(round=round_)) for worker, round_ in ahead.items()]
        return [PacketToSend(EVERYONE, slot.close(self.epoch)), *later]  # 13

    def _complete(self, slot: AggregationSlot) -> bool:
        return slot.heard.bit_count() >= self.terms.needed and not slot.awaited & ~slot.heard

    def _notify_straggler(self, slot: AggregationSlot, packet: Packet) -> list[PacketToSend]:
        """What this packet belongs to has been answered without it, and it is told so by that answer."""
        if slot.last_heard[packet.worker] >= packet.key.round:
            return self._repeated(slot, packet)
        self.counters.late += 1
        slot.last_heard[packet.worker] = packet.key.round
        return [self._stored(slot, packet)]

    def _repeated(self, slot: AggregationSlot, packet: Packet) -> list[PacketToSend]:
        self.counters.duplicates += 1
        if packet.key.round == slot.expected_round and not slot.done:
            self._hold(packet)
            return []
        return [self._stored(slot, packet)]

    def _stored(self, slot: AggregationSlot, packet: Packet) -> PacketToSend:
        self.counters.sent_again += 1
        result = slot.result(packet.key.round)
        if result is None:
            result = pack(PacketKind.OBSOLETE, packet.key, SERVER, self.epoch)
        return PacketToSend(packet.worker, result)

    def _hold(self, packet: Packet) -> None:
        if self._acknowledges:
            self._held.setdefault(packet.worker, []).append(packet.key)

    def _answer(self, packet: Packet) -> list[PacketToSend]:
        """A worker has heard that its contribution is held, and nothing since."""
        slot = self._slot(packet.key)
        if slot.last_heard[packet.worker] < packet.key.round:
            return [self._wanted(packet.worker, packet.key)]
        if packet.key.round == slot.expected_round and not slot.done:
            self._hold(packet)
            return self._want(slot, packet.key, slot.missing) if self._lacking(slot) else []
        return [self._stored(slot, packet)]

    # -- after a restart -------------------------------------------------------------------------------------

    def _lacking(self, slot: AggregationSlot) -> bool:
        """Whether a worker may have the result of this round from an earlier life of the server."""
        return self.resumed and not slot.closed

    def _go_back(self, slot: AggregationSlot, key: PacketKey, now: float) -> None:
        """Begin again with an older round, whose result a worker lacks."""
        heard = [worker for worker in range(self.terms.world_size) if slot.heard >> worker & 1]
        slot.ahead.update((worker, slot.expected_round) for worker in heard)
        for worker in heard:
            slot.last_heard[worker] = -1
        self._open.pop(key[1:], None)
        self._begin(slot, key, now)

    def _too_early(self, slot: AggregationSlot, packet: Packet) -> list[PacketToSend]:
        """A worker is a round ahead of one that is under way."""
        if not self._lacking(slot):
            self.counters.refused += 1
            raise FrameError(
                f"Expected round {slot.expected_round} of stream {packet.key.stream} from worker {packet.worker} "
                f"before any later one, got {packet.key.round}. Do: submit all rounds on all workers."
            )
        slot.ahead[packet.worker] = packet.key.round
        return [self._wanted(packet.worker, packet.key._replace(round=slot.expected_round))]

    def _want(self, slot: AggregationSlot, key: PacketKey, workers: list[int]) -> list[PacketToSend]:
        return [self._wanted(worker, key._replace(round=slot.expected_round)) for worker in workers]

    def _wanted(self, worker: int, key: PacketKey) -> PacketToSend:
        return PacketToSend(worker, pack(PacketKind.WANTED, key, SERVER, self.epoch))

    # -- packets ---------------------------------------------------------------------------------------------

    def _begin(self, slot: AggregationSlot, key: PacketKey, now: float) -> None:
        slot.begin(key.round)
        self._open[key[1:]] = now

    def _slot(self, key: PacketKey) -> AggregationSlot:
        slot = self._slots.get(key[1:])
        if slot is None:
            slot = self._slots[key[1:]] = AggregationSlot(self.terms, key.stream, key.packet)
        return slot

    def _admit(self, datagram: bytes | memoryview | np.ndarray, sender: int | None) -> Packet:
        try:
            packet = unpack(datagram)
        except FrameError:
            self.counters.corrupt += 1
            raise
        if not self._fits(packet) or sender not in (None, packet.worker):
            self.counters.refused += 1
            raise FrameError(f"Expected a contribution that fits the terms, got {packet.kind.name} of {packet.key}.")
        return packet

    def _fits(self, packet: Packet) -> bool:
        round_, stream, place = packet.key
        if (
            packet.worker >= self.terms.world_size
            or stream >= len(self._sizes)
            or round_ > MAX_ROUND
            or packet.num_added
        ):
            return False
        num_packets, whole, last = self._sizes[stream]
        if place >= num_packets:
            return False
        if packet.kind is PacketKind.DATA:
            return packet.body.nbytes in (0, last if place == num_packets - 1 else whole)
        return packet.kind is PacketKind.ASK and not packet.body.nbytes and not packet.flags

    def _packet_sizes(self, stream: int) -> tuple[int, int, int]:
        """Number of packets of a stream, bytes of the body of each, and of the last."""
        num_packets = self.terms.num_packets(stream)
        first, last = self.terms.elements(stream, 0), self.terms.elements(stream, num_packets - 1)
        return num_packets, self.terms.payload_bytes(stream, first), self.terms.payload_bytes(stream, last)
