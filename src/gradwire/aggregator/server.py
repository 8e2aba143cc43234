"""The aggregation server without I/O: packets in, packets out.

Guarantees: each contribution is added exactly once, whatever is lost, repeated, reordered or damaged on the way. All
workers get the same result, which names the workers in it. A result is kept until every worker has been heard in a
later round. A packet of an earlier round changes no sum, and its sender gets the stored result. A packet for another
incarnation of the server changes nothing. A packet that does not fit the session configuration is refused before
anything is allocated.

A restarted server has lost everything. Workers resend what has not been answered. If one of them lacks a result that
the others already have, the server asks the others for their contributions (WANTED), so a slot starts with the lowest
round that any worker needs.

If workers fill results that do not come in time (`SessionConfig.fill_seconds`), a later round of a sum discards the
current one, as in pseudocode 1, and the server neither waits for sums nor goes back to earlier ones.

Source: THC (Li et al. 2024), pseudocode 1 (`AggregatorStateMachine._aggregate`), and section 6 for partial aggregation.
Differences: a bitmap instead of a count, so that a repeated packet is added once; results are stored, so that a worker
that was late or lost a reply gets the same one; the number of workers is agreed, not taken from packets; a later round
does not discard the current one unless workers fill; a straggler is left out at most `max_misses` times in a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradwire.aggregator.packet import (
    MAX_ROUND,
    PACKET_HEADER_BYTES,
    SERVER,
    Packet,
    PacketCounters,
    PacketKey,
    PacketKind,
    keys_to,
    pack,
    unpack,
)
from gradwire.aggregator.session import SessionConfig
from gradwire.aggregator.slot import NEVER, AggregationSlot
from gradwire.core.errors import FrameError

EVERYONE = -1
_MAX_HELD_KEYS = 64  # so that a HELD packet fits the least MTU of a session
_NO_KEY = PacketKey(0, 0, 0)


class PacketToSend(NamedTuple):
    """A packet to send.

    Attributes:
        worker: Receiver, or `EVERYONE`.
        packet: uint8, not to be modified.
    """

    worker: int
    packet: np.ndarray


class UnansweredPacket(NamedTuple):
    """A packet whose round is still open.

    Attributes:
        since: When its first contribution arrived, on the caller's clock.
        key: Round, stream and packet.
        missing: Workers that have not been heard.
    """

    since: float
    key: PacketKey
    missing: list[int]


class AggregatorStateMachine:
    """The server's side of one session. One thread owns it, and makes all calls but `oldest_open`.

    Args:
        config: Session configuration.
        epoch: Random number of this incarnation of the server.
        acknowledges: Whether workers are told that a contribution has arrived. Needed if packets can be lost.

    Attributes:
        max_packet_bytes: Size of the longest packet that may arrive.
        resumed: If true, an earlier incarnation of the server has answered some of the workers.
        counters: Packet counts so far.
    """

    def __init__(self, config: SessionConfig, epoch: int, *, acknowledges: bool = True) -> None:
        self.config = config
        self.epoch = epoch
        self.resumed = False
        self.counters = PacketCounters()
        self._acknowledges = acknowledges
        self._slots: dict[tuple[int, int], AggregationSlot] = {}
        self._open: dict[tuple[int, int], float] = {}  # when their rounds began, oldest first
        self._held: dict[int, list[PacketKey]] = {}
        self._sizes = [self._packet_sizes(stream) for stream in range(len(config.streams))]
        self.max_packet_bytes = PACKET_HEADER_BYTES + max((body for _, body, _ in self._sizes), default=0)

    def receive(
        self, datagram: bytes | memoryview | np.ndarray, now: float, sender: int | None = None
    ) -> list[PacketToSend]:
        """Process a received packet, and return the packets to send.

        Args:
            datagram: Untrusted bytes; the memory may be reused after the call.
            now: Seconds on the caller's monotonic clock.
            sender: Worker that sent it, if the connection proves that.

        Raises:
            FrameError: It is not a packet, or not one that this sender may send. Nothing has changed.
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
        """Acknowledge what has arrived since the last flush."""
        held, self._held = self._held, {}
        messages = [
            PacketToSend(
                worker,
                pack(PacketKind.HELD, _NO_KEY, SERVER, self.epoch, keys_to(keys[start : start + _MAX_HELD_KEYS])),
            )
            for worker, keys in held.items()
            for start in range(0, len(keys), _MAX_HELD_KEYS)
        ]
        self.counters.sent += len(messages)
        return messages

    def total_counters(self) -> PacketCounters:
        """Return the packet counts so far, wherever packets are counted."""
        return self.counters

    def oldest_open(self) -> UnansweredPacket | None:
        """Return the packet that has waited longest for contributions. Any thread may call this."""
        for key in list(self._open):  # a copy: another thread may be adding up
            since, slot = self._open.get(key), self._slots[key]
            if since is not None:
                return UnansweredPacket(since, PacketKey(slot.expected_round, *key), slot.missing)
        return None

    # -- pseudocode 1 ----------------------------------------------------------------------------------------

    def _aggregate(self, packet: Packet, now: float) -> list[PacketToSend]:
        """Process a contribution. The numbers are the lines of pseudocode 1."""
        slot = self._slot(packet.key)
        if packet.key.round < slot.expected_round:  # 1
            if not self._may_lack_result(slot):
                return self._notify_straggler(slot, packet)  # 2
            self._go_back(slot, packet.key, now)
        elif packet.key.round > slot.expected_round:  # 6
            if not slot.done and not slot.fills:
                return self._too_early(slot, packet)
            self.counters.abandoned += not slot.done
            self._begin(slot, packet.key, now)  # 7, 8
        if slot.last_heard[packet.worker] == packet.key.round:
            return self._repeated(slot, packet)
        if slot.done:
            return self._notify_straggler(slot, packet)
        self.counters.taken += 1
        slot.hear(packet)  # 5, 10, 11
        if not self._complete(slot):  # 12
            self._hold(packet)  # 15
            is_first = slot.heard.bit_count() == 1
            return self._ask_missing(slot, packet.key) if is_first and self._may_lack_result(slot) else []
        self._open.pop(packet.key[1:], None)
        ahead, slot.ahead = slot.ahead, {}
        later = [self._wanted(worker, packet.key._replace(round=round_)) for worker, round_ in ahead.items()]
        return [PacketToSend(EVERYONE, slot.close(self.epoch)), *later]  # 13

    def _complete(self, slot: AggregationSlot) -> bool:
        return slot.heard.bit_count() >= self.config.needed and not slot.awaited & ~slot.heard

    def _notify_straggler(self, slot: AggregationSlot, packet: Packet) -> list[PacketToSend]:
        """Answer a contribution that came too late with the result that went without it."""
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
        """Process a worker's question for the result of a contribution that is held."""
        slot = self._slot(packet.key)
        if slot.last_heard[packet.worker] < packet.key.round:
            return [self._wanted(packet.worker, packet.key)]
        if packet.key.round == slot.expected_round and not slot.done:
            self._hold(packet)
            return self._ask_missing(slot, packet.key) if self._may_lack_result(slot) else []
        return [self._stored(slot, packet)]

    # -- after a restart -------------------------------------------------------------------------------------

    def rejoined(self, worker: int) -> list[PacketToSend]:
        """Return questions for a worker that has joined again: what others wait for, and it may have the result of.

        Such a question was asked when the first contribution came, but perhaps while this worker was away.
        """
        if not self.resumed:
            return []
        slots = [(PacketKey(self._slots[key].expected_round, *key), self._slots[key]) for key in list(self._open)]
        asked = [key for key, slot in slots if self._may_lack_result(slot) and worker in slot.missing]
        self.counters.sent += len(asked)
        return [self._wanted(worker, key) for key in asked]

    def _may_lack_result(self, slot: AggregationSlot) -> bool:
        """Whether some workers may have this round's result from an earlier incarnation, and others wait for it."""
        return self.resumed and not slot.num_answered and not slot.fills

    def _go_back(self, slot: AggregationSlot, key: PacketKey, now: float) -> None:
        """Start over with an older round, whose result a worker lacks."""
        heard = [worker for worker in range(self.config.world_size) if slot.heard >> worker & 1]
        slot.ahead.update((worker, slot.expected_round) for worker in heard)
        for worker in heard:
            slot.last_heard[worker] = NEVER
        self._open.pop(key[1:], None)
        self._begin(slot, key, now)

    def _too_early(self, slot: AggregationSlot, packet: Packet) -> list[PacketToSend]:
        """Process a contribution to a round after the current one."""
        if not self._may_lack_result(slot):
            self.counters.refused += 1
            raise FrameError(
                f"Worker {packet.worker} sent round {packet.key.round} of stream {packet.key.stream} while round "
                f"{slot.expected_round} is not complete. Submit all rounds on all workers."
            )
        slot.ahead[packet.worker] = packet.key.round
        return [self._wanted(packet.worker, packet.key._replace(round=slot.expected_round))]

    def _ask_missing(self, slot: AggregationSlot, key: PacketKey) -> list[PacketToSend]:
        return [self._wanted(worker, key._replace(round=slot.expected_round)) for worker in slot.missing]

    def _wanted(self, worker: int, key: PacketKey) -> PacketToSend:
        return PacketToSend(worker, pack(PacketKind.WANTED, key, SERVER, self.epoch))

    # -- packets ---------------------------------------------------------------------------------------------

    def _begin(self, slot: AggregationSlot, key: PacketKey, now: float) -> None:
        slot.begin(key.round)
        if not slot.fills:  # nobody waits for long
            self._open[key[1:]] = now

    def _slot(self, key: PacketKey) -> AggregationSlot:
        slot = self._slots.get(key[1:])
        if slot is None:
            slot = self._slots[key[1:]] = AggregationSlot(self.config, key.stream, key.packet)
        return slot

    def _admit(self, datagram: bytes | memoryview | np.ndarray, sender: int | None) -> Packet:
        try:
            packet = unpack(datagram)
        except FrameError:
            self.counters.corrupt += 1
            raise
        misfit = self._misfit(packet, sender)
        if misfit is not None:
            self.counters.refused += 1
            raise FrameError(
                f"Expected {misfit[0]}, got {misfit[1]} (in {packet.kind.name} of {packet.key}). Start all workers "
                "with one model and configuration."
            )
        return packet

    def _misfit(self, packet: Packet, sender: int | None) -> tuple[str, object] | None:
        """What a packet should have, and what it has; None if it fits sender and session configuration."""
        round_, stream, index = packet.key
        if packet.worker >= self.config.world_size:
            return f"a worker below {self.config.world_size}", packet.worker
        if sender not in (None, packet.worker):
            return f"worker {sender}, whose connection it is", packet.worker
        if stream >= len(self._sizes):
            return f"a stream below {len(self._sizes)}", stream
        if round_ > MAX_ROUND:
            return f"a round of at most {MAX_ROUND}", round_
        num_packets, body, last_body = self._sizes[stream]
        if index >= num_packets:
            return f"a packet below {num_packets}", index
        if packet.kind not in (PacketKind.DATA, PacketKind.ASK):
            return "DATA or ASK", packet.kind.name
        return self._misfit_of_content(packet, last_body if index == num_packets - 1 else body)

    def _misfit_of_content(self, packet: Packet, body_bytes: int) -> tuple[str, object] | None:
        if packet.num_added:
            return "0 contributions", packet.num_added
        if packet.kind is PacketKind.ASK and packet.flags:
            return "no flags", packet.flags
        allowed = (0, body_bytes) if packet.kind is PacketKind.DATA else (0,)
        if packet.body.nbytes not in allowed:
            return f"a body of {' or '.join(map(str, allowed))} bytes", packet.body.nbytes
        return None

    def _packet_sizes(self, stream: int) -> tuple[int, int, int]:
        """Number of packets of a stream, and the bytes of the body of each and of the last."""
        num_packets = self.config.num_packets(stream)
        first, last = self.config.elements(stream, 0), self.config.elements(stream, num_packets - 1)
        return num_packets, self.config.payload_bytes(stream, first), self.config.payload_bytes(stream, last)
