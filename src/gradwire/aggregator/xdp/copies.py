"""The program of traffic control behind the XDP program: sends one answer to several workers, as copies of the packet.

It takes up what carries an `ANSWER` in its metadata, which only the XDP program can have put there, and turns the
packet that completed a sum into its result. Everything else continues to the Python server and to the rest of the
system. A worker is reached where its last packet came from, at the address with which it has joined; one that has sent
nothing gets nothing. It asks, or is asked over TCP (`KernelStateMachine.questions`).

Where copies are signed, each is marked for the program that signs it on its way out (`signatures.py`).

Copies share the packet's bytes in the kernel until their headers are written, so a result is copied from the slot once.
A copy that the interface has no room for is lost, as any datagram may be.
"""

from __future__ import annotations

from gradwire.aggregator.packet import PACKET_HEADER_BYTES, PacketKind
from gradwire.aggregator.xdp.assembler import Assembler, Register
from gradwire.aggregator.xdp.frames import (
    HEADER_BYTES,
    KEY_BYTES,
    Control,
    address_to,
    get,
    server_in,
    write_control,
    write_held,
    write_lengths,
)
from gradwire.aggregator.xdp.layout import ANSWER, EPOCH_AT, INTERFACE_AT, MARK, Layout
from gradwire.aggregator.xdp.program import (
    CHECKSUMS_MAP,
    FIND,
    SESSION_MAP,
    SLOTS_MAP,
    STREAMS_MAP,
    WORKERS_MAP,
    find,
)

CONTINUE, DROP = -1, 2
_STORE, _CLONE, _RESIZE, PULL = 9, 13, 38, 39
LENGTH_AT, MARK_AT, DATA_AT, END_AT, _METADATA_AT = 0, 8, 76, 80, 140


def emit(layout: Layout) -> Assembler:
    """Return the program for a layout."""
    return _Program(layout).code


class _Program:
    """The program as it is appended to, top down."""

    def __init__(self, layout: Layout) -> None:
        self.code, self.layout = Assembler("tc"), layout
        code = self.code
        self._key_room = code.room(8)
        metadata, data = self._pointer(_METADATA_AT), self._pointer(DATA_AT)
        with code.when(metadata.at(ANSWER.size) > data):
            code.leave(CONTINUE)
        results, wanted, round_ = (code.load(metadata, offset) for offset in (0, 8, 16))
        slot, buffer = code.load(metadata, 24, 4), code.load(metadata, 28, 2)
        kind = code.load(metadata, 30, 1)
        code.call(PULL, code.context, HEADER_BYTES + PACKET_HEADER_BYTES)
        frame = self._frame(HEADER_BYTES + PACKET_HEADER_BYTES)
        self._server = server_in(code, frame)
        self._session, self._checksums = self._find(SESSION_MAP, 0), self._find(CHECKSUMS_MAP, 0)
        packet = frame.at(HEADER_BYTES)
        worker, own_round = get(code, packet, "worker"), get(code, packet, "round")
        control = Control(
            kind,
            own_round,
            get(code, packet, "stream"),
            get(code, packet, "packet"),
            code.load(self._session, EPOCH_AT),
        )
        with code.when(results.differs(0)):
            self._send_results(results, slot, buffer, control.stream)
        with code.when(wanted.differs(0)):
            asking = control._replace(kind=PacketKind.WANTED, round=round_)
            self._send_control(write_control, asking, 0, wanted)
        with code.when(kind.equals(PacketKind.HELD)):
            self._send_control(write_held, control, KEY_BYTES, code.number(1) << worker)
        code.leave(DROP)

    def _send_results(self, workers: Register, slot: Register, buffer: Register, stream: Register) -> None:
        code, layout = self.code, self.layout
        entry, value = self._find(STREAMS_MAP, stream), self._find(SLOTS_MAP, slot)
        width = code.load(entry, 12, 4)
        with code.when(buffer >= layout.num_buffers):
            code.leave(DROP)
        sealed = value.at(layout.buffers + 8).at(buffer * layout.buffer_bytes)
        for each, _ in layout.sizes:
            with code.when(width.equals(each)):
                length = layout.result_bytes(each)
                self._resize(length + layout.guard.trailer_bytes)
                code.call(_STORE, code.context, HEADER_BYTES, sealed, length, 0)
                self._send_copies(workers)

    def _send_control(self, write, control: Control, body_bytes: int, workers: Register) -> None:  # type: ignore[no-untyped-def]
        code, layout = self.code, self.layout
        length = PACKET_HEADER_BYTES + body_bytes + layout.guard.trailer_bytes
        frame = self._resize(length)
        write(code, layout, frame.at(HEADER_BYTES), control, self._checksums)
        self._send_copies(workers)

    def _resize(self, packet_bytes: int) -> Register:
        """Make the packet as long as the answer, and return a pointer to its frame, of which headers can be written."""
        code = self.code
        with code.when(code.call(_RESIZE, code.context, HEADER_BYTES + packet_bytes, 0).differs(0)):
            code.leave(DROP)
        code.call(PULL, code.context, HEADER_BYTES + packet_bytes)
        frame = self._frame(HEADER_BYTES + packet_bytes)
        write_lengths(code, frame, packet_bytes)
        return frame

    def _send_copies(self, workers: Register) -> None:
        code, layout = self.code, self.layout
        with code.loop(layout.world_size) as each, code.when((workers >> each.index & 1).differs(0)):
            skip = code.label()
            code.store(self._key_room, 0, each.index, 4)
            record = code.find(FIND, code.map(WORKERS_MAP), self._key_room)
            with code.when(record.equals(0)):
                code.leave(DROP)
            interface = code.load(record, INTERFACE_AT, 4)
            with code.when(interface.equals(0)):
                code.jump(skip)
            frame = self._frame(HEADER_BYTES + PACKET_HEADER_BYTES)
            address_to(code, frame, layout.port, self._server, record)
            if layout.guard.trailer_bytes:
                code.store(code.context, MARK_AT, each.index + MARK, 4)
            code.call(_CLONE, code.context, interface, 0)
            code.place(skip)

    # -- small things ----------------------------------------------------------------------------------------

    def _pointer(self, offset: int) -> Register:
        return self.code.load(self.code.context, offset, 4).as_pointer()

    def _frame(self, num_bytes: int) -> Register:
        """Return a pointer to the frame, once it is certain that it has `num_bytes` bytes."""
        frame, end = self._pointer(DATA_AT), self._pointer(END_AT)
        with self.code.when(frame.at(num_bytes) > end):
            self.code.leave(DROP)
        return frame

    def _find(self, name: str, key: Register | int) -> Register:
        return find(self.code, self._key_room, name, key, DROP)
