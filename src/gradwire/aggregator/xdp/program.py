"""The XDP program: verifies a data packet, runs pseudocode 1 on its slot, and answers its sender.

What is not a data packet of a full length for a sum that the program was told of passes to the Python server: maxima,
the last packets of streams, tables of other widths than 4 bits, and everything that is damaged so that it cannot be
told what it is. Results and questions to several workers pass on to the reply program (`copies.py`) with an `ANSWER`
in the metadata of the packet, because XDP cannot send copies.

Where packets have numbers, one that was used gets no answer.

Source: THC (Li et al. 2024), pseudocode 1 and appendix C. Differences: see `gradwire.aggregator.server`.
"""

from __future__ import annotations

from gradwire.aggregator.packet import (
    KNOWN_FLAGS,
    PACKET_HEADER_BYTES,
    VERSION,
    PacketKind,
)
from gradwire.aggregator.xdp.assembler import Assembler, Register
from gradwire.aggregator.xdp.frames import (
    HEADER_BYTES,
    IP_AT,
    KEY_BYTES,
    UDP_AT,
    UDP_BYTES,
    Control,
    get,
    is_ours,
    return_to_sender,
    sign,
    write_control,
    write_held,
)
from gradwire.aggregator.xdp.layout import (
    ANSWER,
    BITS_AT,
    EPOCH_AT,
    INTERFACE_AT,
    LINK_AT,
    NEXT_AT,
    RECEIVED_KEY_AT,
    STREAMS_AT,
    WINDOW_WORDS,
    Counter,
    Layout,
)
from gradwire.aggregator.xdp.slot_program import Arrival, Memory, SlotAnswer, SlotProgram
from gradwire.net.datagrams import WINDOW

DROP, PASS, SEND_BACK = 1, 2, 3
FIND, NOW, REDIRECT, ADJUST_METADATA, ADJUST_TAIL, LOCK, UNLOCK = 1, 5, 51, 54, 65, 93, 94
_TO_ALL = 1 << 3
SESSION_MAP, STREAMS_MAP, WORKERS_MAP, TABLES_MAP, WINDOWS_MAP = "session", "streams", "workers", "tables", "windows"
SLOTS_MAP, BEGAN_MAP, COUNTERS_MAP, CHECKSUMS_MAP = "slots", "began", "counters", "checksums"
DEVICES_MAP, TURNS_MAP = "devices", "turns"


def find(code: Assembler, room: Register, name: str, key: Register | int, otherwise: int) -> Register:
    """Return a pointer to a value of a map. Without one, the program ends with `otherwise`.

    Args:
        code: The program.
        room: Room for the key, 4 bytes.
        name: Name of the map.
        key: Key.
        otherwise: What the program returns without a value.
    """
    code.store(room, 0, key, 4)
    value = code.find(FIND, code.map(name), room)
    with code.when(value.equals(0)):
        code.leave(otherwise)
    return value


def emit(layout: Layout) -> Assembler:
    """Return the program for a layout."""
    return _Program(layout).code


class _Program:
    """The program as it is appended to, top down."""

    def __init__(self, layout: Layout) -> None:
        self.code, self.layout = Assembler("xdp"), layout
        self._key_room, self._new_room = self.code.room(8), self.code.room(8)
        frame, end = self._frame()
        with self.code.when(frame.at(HEADER_BYTES + PACKET_HEADER_BYTES) > end):
            self.code.leave(PASS)
        with self.code.when(is_ours(self.code, frame, layout.port).equals(0)):
            self.code.leave(PASS)
        self._dispatch(frame, end)

    def _dispatch(self, frame: Register, end: Register) -> None:
        """Pass what the program does not add up, and verify the rest."""
        code, layout = self.code, self.layout
        packet = frame.at(HEADER_BYTES)
        session = self._find(SESSION_MAP, 0)
        stream, index = get(code, packet, "stream"), get(code, packet, "packet")
        with code.when(stream >= code.load(session, STREAMS_AT)):
            code.leave(PASS)
        entry = self._find(STREAMS_MAP, stream)
        with code.when(index >= code.load(entry, 4, 4)):
            code.leave(PASS)
        length, width = code.swapped(code.load(frame, UDP_AT + 4, 2), 2), code.load(entry, 12, 4)
        for each, _ in layout.sizes:
            for body_bytes in (0, layout.body_bytes(each)):
                whole = PACKET_HEADER_BYTES + body_bytes + layout.guard.trailer_bytes
                with code.when(((length ^ UDP_BYTES + whole) | (width ^ each)).equals(0)):
                    with code.when(frame.at(HEADER_BYTES + whole) > end):
                        code.leave(PASS)
                    self._process(frame, session, entry, body_bytes, each)
        code.leave(PASS)

    def _process(self, frame: Register, session: Register, entry: Register, body_bytes: int, width: int) -> None:
        """Process a packet with a body of this length, for sums of this width in bits. Leaves the program."""
        code, layout = self.code, self.layout
        packet = frame.at(HEADER_BYTES)
        counters, checksums = self._find(COUNTERS_MAP, 0), self._find(CHECKSUMS_MAP, 0)
        named = get(code, packet, "worker")
        worker = (named < layout.world_size).otherwise(named, 0)
        record = self._find(WORKERS_MAP, worker)
        key = code.load(record, RECEIVED_KEY_AT), code.load(record, RECEIVED_KEY_AT + 8)
        length = PACKET_HEADER_BYTES + body_bytes
        holds = layout.guard.verify(code, packet, length, key, checksums).as_number()
        if layout.guard.trailer_bytes:
            self._drop_unless(holds, counters, Counter.FORGED)
            self._drop_unless(self._is_new(worker, code.load(packet, length)), counters, Counter.REPLAYED)
        code.increase(counters, 8 * Counter.RECEIVED)
        if not layout.guard.trailer_bytes:
            self._drop_unless(holds, counters, Counter.CORRUPT)
        self._drop_unless(self._is_well_formed(packet, body_bytes), counters, Counter.CORRUPT)
        is_known = named.equals(worker).as_number() & self._is_from(frame, record)
        self._drop_unless(is_known & self._may_be_sent(packet, body_bytes), counters, Counter.REFUSED)
        is_current = get(code, packet, "epoch").equals(code.load(session, EPOCH_AT))
        self._drop_unless(is_current.as_number(), counters, Counter.STALE)
        code.store(record, LINK_AT, code.load(frame, 6, 4), 4)
        code.store(record, LINK_AT + 4, code.load(frame, 10, 2), 2)
        code.store(record, INTERFACE_AT, code.load(code.context, 12, 4), 4)
        self._add_up(packet, session, entry, counters, checksums, worker, record, body_bytes, width)

    def _is_new(self, worker: Register, number: Register) -> Register:
        """Whether a proven number has not come before; it has now. As in `gradwire.net.datagrams.DatagramReceiver`."""
        code, end, cleared = self.code, self.code.label(), self.code.label()
        window = self._find(WINDOWS_MAP, worker)
        code.store(self._new_room, 0, 0)
        code.call(LOCK, window)
        following, last, bit = code.load(window, NEXT_AT), number >> 6, code.number(1) << (number & 63)
        bits = window.at(BITS_AT)
        with code.when(number >= following):
            first = following + 63 >> 6  # word of which no bit has been set
            with code.loop(WINDOW_WORDS) as turn:
                fresh = first + turn.index
                with code.when(fresh > last):
                    code.jump(cleared)
                code.store(bits.at((fresh & WINDOW_WORDS - 1) << 3), 0, 0)
            code.place(cleared)
            code.store(window, NEXT_AT, number + 1)
        word = bits.at((last & WINDOW_WORDS - 1) << 3)
        following, seen = code.load(window, NEXT_AT), code.load(word)
        with code.when(following - number > WINDOW):
            code.jump(end)
        with code.when((seen & bit).differs(0)):
            code.jump(end)
        code.store(word, 0, seen | bit)
        code.store(self._new_room, 0, 1)
        code.place(end)
        code.call(UNLOCK, window)
        return code.load(self._new_room)

    def _is_well_formed(self, packet: Register, body_bytes: int) -> Register:
        code = self.code
        kind = get(code, packet, "kind")
        kinds = (kind < 1).as_number() | (kind > max(PacketKind)).as_number()
        flags = (get(code, packet, "flags") > KNOWN_FLAGS).as_number()
        differing = (get(code, packet, "version") ^ VERSION) | (get(code, packet, "length") ^ body_bytes)
        return (kinds | flags | differing).equals(0).as_number()

    def _is_from(self, frame: Register, record: Register) -> Register:
        """Whether a frame is from the address that the worker has joined with: no other is answered."""
        address = self.code.load(frame, IP_AT + 12, 4) ^ self.code.load(record, 0, 4)
        port = self.code.load(frame, UDP_AT, 2) ^ self.code.load(record, 4, 2)
        return (address | port).equals(0).as_number()

    def _may_be_sent(self, packet: Register, body_bytes: int) -> Register:
        code = self.code
        kind, flags = get(code, packet, "kind"), get(code, packet, "flags")
        is_data, is_question = kind.equals(PacketKind.DATA), kind.equals(PacketKind.ASK)
        bare_question = is_question.as_number() & flags.equals(0).as_number() if body_bytes == 0 else code.number(0)
        fits = get(code, packet, "count").equals(0).as_number()
        counts_on = get(code, packet, "round").differs((1 << 64) - 1).as_number()
        return (is_data.as_number() | bare_question) & fits & counts_on

    def _add_up(
        self, packet: Register, session: Register, entry: Register, counters: Register, checksums: Register,
        worker: Register, record: Register, body_bytes: int, width: int,
    ) -> None:  # fmt: skip
        """Run pseudocode 1 with the slot locked, and send or pass on what it decides."""
        code = self.code
        number = code.load(entry, 0, 4) + get(code, packet, "packet")
        slot, began = self._find(SLOTS_MAP, number), self._find(BEGAN_MAP, number)
        table = self._find(TABLES_MAP, code.load(entry, 8, 4))
        now = code.call(NOW)
        arrival = Arrival(
            kind=get(code, packet, "kind"), round=get(code, packet, "round") + 1, stream=get(code, packet, "stream"),
            packet=get(code, packet, "packet"), worker=worker, bit=code.number(1) << worker,
            flags=get(code, packet, "flags"), has_body=body_bytes > 0, body=packet.at(PACKET_HEADER_BYTES), width=width,
            table=table,
        )  # fmt: skip
        decision, end = SlotAnswer(code), code.label()
        code.call(LOCK, slot)
        memory = Memory(slot, began, now, session, counters, checksums)
        SlotProgram(code, self.layout, arrival, memory, decision, end).emit()
        code.place(end)
        code.call(UNLOCK, slot)
        self._send(arrival, memory, decision, number, record, body_bytes)

    # -- answers ---------------------------------------------------------------------------------------------

    def _send(
        self, arrival: Arrival, memory: Memory, decision: SlotAnswer, slot: Register, record: Register, body_bytes: int
    ) -> None:
        code = self.code
        epoch, kind = code.load(memory.session, EPOCH_AT), decision.get(SlotAnswer.KIND)
        control = Control(kind, arrival.round - 1, arrival.stream, arrival.packet, epoch)
        pass_on = code.label()
        with code.when((decision.get(SlotAnswer.RESULT) | decision.get(SlotAnswer.WANTED)).differs(0)):
            code.jump(pass_on)
        for what, answer_bytes, write in (
            (PacketKind.HELD, KEY_BYTES, write_held),
            (PacketKind.OBSOLETE, 0, write_control),
        ):
            with code.when(kind.equals(what)):
                frame = self._resize(answer_bytes - body_bytes, answer_bytes, pass_on)
                length = PACKET_HEADER_BYTES + answer_bytes
                write(code, self.layout, frame.at(HEADER_BYTES), control, memory.checksums)
                sign(code, self.layout, frame.at(HEADER_BYTES), length, record)
                return_to_sender(code, frame, length + self.layout.guard.trailer_bytes)
                code.leave(SEND_BACK)
        code.leave(DROP)
        code.place(pass_on)
        self._pass_on(decision, slot, memory.counters)

    def _resize(self, change: int, body_bytes: int, otherwise: str) -> Register:
        """Change the length of the frame, and return its new pointer."""
        code = self.code
        if change:
            with code.when(code.call(ADJUST_TAIL, code.context, change).differs(0)):
                code.jump(otherwise)
        frame, end = self._frame()
        whole = HEADER_BYTES + PACKET_HEADER_BYTES + body_bytes + self.layout.guard.trailer_bytes
        with code.when(frame.at(whole) > end):
            code.leave(DROP)
        return frame

    def _pass_on(self, decision: SlotAnswer, slot: Register, counters: Register) -> None:
        """Leave the decision in the packet's metadata, for the program that sends copies. Some drivers have none."""
        code = self.code
        has_room = code.call(ADJUST_METADATA, code.context, -ANSWER.size).equals(0).as_number()
        self._drop_unless(has_room, counters, Counter.STUCK)
        frame = code.load(code.context, 0, 4).as_pointer()
        answer = code.load(code.context, 8, 4).as_pointer()
        with code.when(answer.at(ANSWER.size) > frame):
            code.leave(DROP)
        code.store(answer, 0, decision.get(SlotAnswer.RESULT))
        code.store(answer, 8, decision.get(SlotAnswer.WANTED))
        code.store(answer, 16, decision.get(SlotAnswer.ROUND) - 1)
        code.store(answer, 24, slot, 4)
        code.store(answer, 28, decision.get(SlotAnswer.BUFFER), 2)
        code.store(answer, 30, decision.get(SlotAnswer.KIND), 1)
        code.store(answer, 31, 1, 1)
        if self.layout.broadcast:
            to_all = decision.get(SlotAnswer.RESULT).equals((1 << self.layout.world_size) - 1).as_number()
            alone = (decision.get(SlotAnswer.WANTED) | decision.get(SlotAnswer.KIND)).equals(0).as_number()
            with code.when((to_all & alone).differs(0)):
                code.store(self._find(TURNS_MAP, slot), 0, 0)
                code.leave(code.call(REDIRECT, code.map(DEVICES_MAP), 0, _TO_ALL))
        code.leave(PASS)

    # -- small things ----------------------------------------------------------------------------------------

    def _frame(self) -> tuple[Register, Register]:
        code = self.code
        return code.load(code.context, 0, 4).as_pointer(), code.load(code.context, 4, 4).as_pointer()

    def _find(self, name: str, key: Register | int) -> Register:
        """Return a pointer to a value of a map. Without one, the packet passes."""
        return find(self.code, self._key_room, name, key, PASS)

    def _drop_unless(self, holds: Register, counters: Register, otherwise: Counter) -> None:
        with self.code.when(holds.equals(0)):
            self.code.increase(counters, 8 * otherwise)
            self.code.leave(DROP)
