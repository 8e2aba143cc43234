"""Pseudocode 1 on a slot in a map, between its lock and its unlock: no function of the kernel is called here.

What it decides is what `gradwire.aggregator.server.AggregatorStateMachine` decides, method by method under the same
names; `tests/aggregator/xdp` compares them. It leaves what to send in `SlotAnswer`, on the stack, because the code that
sends must not hold the lock.

Differences from that oracle: results that a worker may ask for are in a fixed number of buffers, of which there are as
many as can be needed; after a restart of the server, one round is kept for all workers that are ahead, because no two
can be ahead by different rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.aggregator.packet import PACKET_HEADER_BYTES, PacketKind
from gradwire.aggregator.xdp.assembler import Assembler, Register
from gradwire.aggregator.xdp.frames import put, write_start
from gradwire.aggregator.xdp.layout import (
    EPOCH_AT,
    INDEX_BITS,
    MISSES_AT,
    NEEDED_AT,
    RESUMED_AT,
    Counter,
    Layout,
)
from gradwire.kernels.blocks import INDEX_CHUNK

_ONES, _TWOS, _FOURS, _EACH = (int.from_bytes(bytes([byte]) * 8, "little") for byte in (0x55, 0x33, 0x0F, 0x01))
_LOW, _HIGH = 0xFFFFFFFF, 0xFFFFFFFF << 32


@dataclass(frozen=True)
class Arrival:
    """A verified packet of a worker, and where its slot is.

    `round` is kept plus 1, `bit` is the worker's in a bitmap, `has_body` whether there is a contribution, `width` the
    bits of an accumulator.
    """

    kind: Register
    round: Register
    stream: Register
    packet: Register
    worker: Register
    bit: Register
    flags: Register
    has_body: bool
    body: Register
    width: int
    table: Register


@dataclass(frozen=True)
class Memory:
    """Pointers to what a program reads and changes."""

    slot: Register
    began: Register
    now: Register
    session: Register
    counters: Register
    checksums: Register


class SlotAnswer:
    """What is to be sent, on the stack: to whom a result, from whom a contribution is wanted, and of which round; the
    buffer of the result; and HELD or OBSOLETE for the sender.
    """

    RESULT, WANTED, ROUND, BUFFER, KIND = range(0, 40, 8)

    def __init__(self, code: Assembler) -> None:
        self._code, self._room = code, code.room(40)
        for place in (self.RESULT, self.WANTED, self.ROUND, self.BUFFER, self.KIND):
            code.store(self._room, place, 0)

    def put(self, place: int, value: Register | int) -> None:
        """Set a part."""
        self._code.store(self._room, place, value)

    def get(self, place: int) -> Register:
        """Return a part."""
        return self._code.load(self._room, place)


class SlotProgram:
    """Emits pseudocode 1 for one packet.

    Args:
        code: Program to append to.
        layout: What the program is made for.
        arrival: The packet.
        memory: Maps.
        decision: Where the decisions go.
        end: Label at which the lock is released.
    """

    def __init__(
        self, code: Assembler, layout: Layout, arrival: Arrival, memory: Memory, decision: SlotAnswer, end: str
    ) -> None:
        self.code, self.layout, self.arrival, self.memory = code, layout, arrival, memory
        self.decision, self.end = decision, end
        self._heard_at = memory.slot.at(layout.LAST_HEARD).at(arrival.worker << 3)

    def emit(self) -> None:
        """Append everything. Ends at the label."""
        code, layout, arrival = self.code, self.layout, self.arrival
        may_lack = self._get(layout.ANSWERED).equals(0).as_number() & code.load(self.memory.session, RESUMED_AT)
        with code.when(arrival.kind.equals(PacketKind.ASK)):
            self._answer(may_lack)
        self._aggregate(may_lack)
        code.jump(self.end)

    # -- pseudocode 1 ----------------------------------------------------------------------------------------

    def _aggregate(self, may_lack: Register) -> None:
        """Process a contribution. The numbers are the lines of pseudocode 1."""
        code, layout, arrival = self.code, self.layout, self.arrival
        expected, started = self._get(layout.EXPECTED), code.label()
        with code.when(arrival.round < expected):  # 1
            with code.when(may_lack.equals(0)):
                self._notify_straggler()  # 2
            self._go_back(expected)
            code.jump(started)
        with code.when(arrival.round > expected):  # 6
            with code.when(self._get(layout.OPEN).differs(0)):
                self._too_early(expected, may_lack)
            self._begin()  # 7, 8
        code.place(started)
        with code.when(code.load(self._heard_at).equals(arrival.round)):
            self._repeated()
        with code.when(self._get(layout.OPEN).equals(0)):
            self._notify_straggler()
        self._count(Counter.TAKEN)
        self._hear()  # 5, 10, 11
        with code.when(self._is_complete().equals(0)):  # 12
            self._hold()  # 15
            is_first = self._popcount(self._get(layout.HEARD)).equals(1).as_number()
            with code.when((is_first & may_lack).differs(0)):
                self._ask_missing()
            code.jump(self.end)
        self._close()  # 13

    def _is_complete(self) -> Register:
        heard, awaited = self._get(self.layout.HEARD), self._get(self.layout.AWAITED)
        enough = (self._popcount(heard) >= self.code.load(self.memory.session, NEEDED_AT)).as_number()
        return enough & (awaited & (heard ^ _HIGH ^ _LOW)).equals(0).as_number()

    def _notify_straggler(self) -> None:
        with self.code.when(self.code.load(self._heard_at) >= self.arrival.round):
            self._repeated()
        self._count(Counter.LATE)
        self.code.store(self._heard_at, 0, self.arrival.round)
        self._stored()

    def _repeated(self) -> None:
        self._count(Counter.DUPLICATES)
        with self.code.when(self._is_open().differs(0)):
            self._hold()
            self.code.jump(self.end)
        self._stored()

    def _stored(self) -> None:
        """Send a kept result to the sender, or that there is none."""
        code, layout, arrival = self.code, self.layout, self.arrival
        self._count(Counter.SENT)
        self._count(Counter.SENT_AGAIN)
        for number in range(layout.num_buffers):
            kept = code.load(self._buffer(number)).equals(arrival.round).as_number()
            with code.when((kept & (arrival.round >= self._get(layout.OLDEST)).as_number()).differs(0)):
                self.decision.put(SlotAnswer.BUFFER, number)
                self.decision.put(SlotAnswer.RESULT, arrival.bit)
                code.jump(self.end)
        self.decision.put(SlotAnswer.KIND, PacketKind.OBSOLETE)
        code.jump(self.end)

    def _hold(self) -> None:
        self._count(Counter.SENT)
        self.decision.put(SlotAnswer.KIND, PacketKind.HELD)

    def _is_open(self) -> Register:
        same = self.arrival.round.equals(self._get(self.layout.EXPECTED)).as_number()
        return same & self._get(self.layout.OPEN)

    def _answer(self, may_lack: Register) -> None:
        """Process a worker's question for the result of a contribution that is held."""
        code, arrival = self.code, self.arrival
        with code.when(code.load(self._heard_at) < arrival.round):
            self._wanted(arrival.bit, arrival.round)
            code.jump(self.end)
        with code.when(self._is_open().differs(0)):
            self._hold()
            with code.when(may_lack.differs(0)):
                self._ask_missing()
            code.jump(self.end)
        self._stored()

    # -- after a restart -------------------------------------------------------------------------------------

    def _go_back(self, expected: Register) -> None:
        """Start over with an older round, whose result a worker lacks."""
        code, layout = self.code, self.layout
        heard = self._get(layout.HEARD)
        self._put(layout.AHEAD, self._get(layout.AHEAD) | heard)
        self._put(layout.AHEAD_ROUND, expected)
        with code.loop(layout.world_size) as workers, code.when((heard >> workers.index & 1).differs(0)):
            code.store(self.memory.slot.at(layout.LAST_HEARD).at(workers.index << 3), 0, 0)
        self._begin()

    def _too_early(self, expected: Register, may_lack: Register) -> None:
        """Process a contribution to a round after the current one."""
        code, layout = self.code, self.layout
        with code.when(may_lack.equals(0)):
            self._count(Counter.REFUSED)
            code.jump(self.end)
        self._put(layout.AHEAD, self._get(layout.AHEAD) | self.arrival.bit)
        self._put(layout.AHEAD_ROUND, self.arrival.round)
        self._wanted(self.arrival.bit, expected)
        code.jump(self.end)

    def _ask_missing(self) -> None:
        everyone = (1 << self.layout.world_size) - 1
        missing = (self._get(self.layout.HEARD) ^ _HIGH ^ _LOW) & everyone
        self._wanted(missing, self._get(self.layout.EXPECTED))

    def _wanted(self, workers: Register, round_: Register) -> None:
        self._count(Counter.SENT, self._popcount(workers))
        self.decision.put(SlotAnswer.WANTED, workers)
        self.decision.put(SlotAnswer.ROUND, round_)

    # -- the slot --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a round, in a buffer whose result nobody may ask for."""
        code, layout = self.code, self.layout
        current = self._get(layout.CURRENT)
        free = current ^ 1
        if layout.partial:
            oldest = self._get(layout.OLDEST)
            for number in range(layout.num_buffers):
                of_round = code.load(self._buffer(number))
                unused = of_round.equals(0).as_number() | (of_round < oldest).as_number()
                free = unused.differs(0).otherwise(number, free)
        chosen = self._get(layout.OPEN).differs(0).otherwise(current, free)
        with code.when(chosen >= layout.num_buffers):
            code.jump(self.end)
        self._put(layout.CURRENT, chosen)
        self._put(layout.EXPECTED, self.arrival.round)
        self._put(layout.OPEN, 1)
        for place in (layout.HEARD, layout.COUNTED, layout.FLAGS):
            self._put(place, 0)
        buffer = self.memory.slot.at(layout.buffers).at(chosen * layout.buffer_bytes)
        code.store(buffer, 0, self.arrival.round)
        with code.loop(layout.buffer_bytes // 8 - 1) as words:
            code.store(buffer.at(8).at(words.index << 3), 0, 0)
        code.store(self.memory.began, 0, self.memory.now)

    def _hear(self) -> None:
        """Add the first contribution of a worker to the current round, or note that it has none."""
        code, layout, arrival = self.code, self.layout, self.arrival
        self._put(layout.HEARD, self._get(layout.HEARD) | arrival.bit)
        code.store(self._heard_at, 0, self._get(layout.EXPECTED))
        self._put(layout.FLAGS, self._get(layout.FLAGS) | arrival.flags)
        if not arrival.has_body:
            return
        self._put(layout.COUNTED, self._get(layout.COUNTED) | arrival.bit)
        sums = self._current_buffer().at(8 + layout.sums_at)
        body_bytes, sum_bytes = layout.body_bytes(arrival.width), arrival.width // 8
        chunk_bytes = min(body_bytes, INDEX_CHUNK * INDEX_BITS // 8)
        add = self._add_bytes if sum_bytes == 1 else self._add_halves
        with code.loop(body_bytes // chunk_bytes) as chunks:
            body = arrival.body.at(chunks.index * chunk_bytes)
            first = sums.at(chunks.index * (2 * chunk_bytes * sum_bytes))
            with code.loop(chunk_bytes // 4) as words:
                low = first.at(words.index * (4 * sum_bytes))
                add(body.at(words.index << 2), low, low.at(chunk_bytes * sum_bytes))

    def _add_bytes(self, body: Register, low: Register, high: Register) -> None:
        """Add the values of four bytes of indices: the low halves are four sums in a row, the high ones four others."""
        code = self.code
        values = self._look_up(body, 0) | self._look_up(body, 1) << 8
        values = values | self._look_up(body, 2) << 16 | self._look_up(body, 3) << 24
        code.store(low, 0, code.load(low, 0, 4) + values, 4)
        code.store(high, 0, code.load(high, 0, 4) + (values >> 32), 4)

    def _add_halves(self, body: Register, low: Register, high: Register) -> None:
        """The same for sums of two bytes."""
        code = self.code
        first = self._look_up(body, 0) | self._look_up(body, 1) << 16
        second = self._look_up(body, 2) | self._look_up(body, 3) << 16
        code.store(low, 0, code.load(low) + ((first & _LOW) | second << 32))
        code.store(high, 0, code.load(high) + (first >> 32 | (second & _HIGH)))

    def _look_up(self, body: Register, place: int) -> Register:
        """Return the values of a byte's two indices, 32 bits apart. Sums cannot overflow into their neighbors."""
        return self.code.load(self.arrival.table.at(self.code.load(body, place, 1) << 3))

    def _close(self) -> None:
        """Answer the round: write the header of the result, and keep it as long as a worker may ask for it."""
        code, layout = self.code, self.layout
        counted = self._get(layout.COUNTED)
        packet = self._current_buffer().at(8)
        self._write_header(packet, counted)
        length = layout.result_bytes(self.arrival.width)
        put(code, packet, "length", length - PACKET_HEADER_BYTES)
        layout.guard.seal(code, packet, length, self.memory.checksums)
        self._put(layout.OLDEST, self._least_heard() if layout.partial else self.arrival.round)
        if layout.partial:
            self._note_misses()
        self._put(layout.OPEN, 0)
        code.increase(self.memory.slot, layout.ANSWERED)
        code.store(self.memory.began, 0, 0)
        self.decision.put(SlotAnswer.RESULT, (1 << layout.world_size) - 1)
        self.decision.put(SlotAnswer.BUFFER, self._get(layout.CURRENT))
        self._count(Counter.SENT)
        ahead = self._get(layout.AHEAD)
        with code.when(ahead.differs(0)):
            self._wanted(ahead, self._get(layout.AHEAD_ROUND))
            self._put(layout.AHEAD, 0)

    def _write_header(self, packet: Register, counted: Register) -> None:
        code, layout = self.code, self.layout
        write_start(code, packet, PacketKind.RESULT, code.load(self.memory.session, EPOCH_AT), 0)
        put(code, packet, "flags", self._get(layout.FLAGS))
        put(code, packet, "round", self._get(layout.EXPECTED) - 1)
        put(code, packet, "stream", self.arrival.stream)
        put(code, packet, "packet", self.arrival.packet)
        put(code, packet, "count", self._popcount(counted))
        code.store(packet, PACKET_HEADER_BYTES, counted, layout.sums_at - PACKET_HEADER_BYTES)

    def _least_heard(self) -> Register:
        code, layout = self.code, self.layout
        with code.loop(layout.world_size, (1 << 64) - 1) as workers:
            heard = code.load(self.memory.slot.at(layout.LAST_HEARD).at(workers.index << 3))
            least = workers.carried[0]
            workers.carry((heard < least).otherwise(heard, least))
        return workers.results[0]

    def _note_misses(self) -> None:
        """Count rounds in a row without each worker, and note who must be waited for."""
        code, layout = self.code, self.layout
        heard, most = self._get(layout.HEARD), code.load(self.memory.session, MISSES_AT)
        with code.loop(layout.world_size, 0) as workers:
            place = self.memory.slot.at(layout.misses).at(workers.index << 3)
            misses = (heard >> workers.index & 1).differs(0).otherwise(0, code.load(place) + 1)
            code.store(place, 0, misses)
            workers.carry(workers.carried[0] | (misses >= most).as_number() << workers.index)
        self._put(layout.AWAITED, workers.results[0])

    # -- small things ----------------------------------------------------------------------------------------

    def _get(self, place: int) -> Register:
        return self.code.load(self.memory.slot, place)

    def _put(self, place: int, value: Register | int) -> None:
        self.code.store(self.memory.slot, place, value)

    def _buffer(self, number: int) -> Register:
        return self.memory.slot.at(self.layout.buffers + number * self.layout.buffer_bytes)

    def _current_buffer(self) -> Register:
        """Pointer to the buffer of the current round, whose number the verifier must see to be small."""
        current = self._get(self.layout.CURRENT)
        with self.code.when(current >= self.layout.num_buffers):
            self.code.jump(self.end)
        return self.memory.slot.at(self.layout.buffers).at(current * self.layout.buffer_bytes)

    def _count(self, counter: Counter, by: Register | int = 1) -> None:
        self.code.increase(self.memory.counters, 8 * counter, by)

    def _popcount(self, value: Register) -> Register:
        value = value - (value >> 1 & _ONES)
        value = (value & _TWOS) + (value >> 2 & _TWOS)
        return ((value + (value >> 4) & _FOURS) * _EACH) >> 56
