"""The program behind a broadcast by the driver: turns each copy of a packet into the result for one worker.

The XDP program redirects the packet that completed a sum to all W + 1 entries of a device map, which name the same
interface. The kernel makes W copies, each in a page with room for a result, and sends the packet itself to the last
entry. This program runs on each of them. It knows the result by the `ANSWER` in the metadata, and counts the copies of
a slot: the k-th goes to worker k, and what comes after W copies is dropped.

Programs of the entries cannot differ by worker: the kernel collects what goes to one interface, and runs the program of
the first entry on all of it.

Results for single workers, and questions, go the way of `copies.py`.
"""
# Shapes: W = workers

from __future__ import annotations

from gradwire.aggregator.packet import PACKET_HEADER_BYTES
from gradwire.aggregator.xdp.assembler import Assembler, Register
from gradwire.aggregator.xdp.frames import (
    HEADER_BYTES,
    address_to,
    get,
    server_in,
    sign,
    write_lengths,
)
from gradwire.aggregator.xdp.layout import ANSWER, INTERFACE_AT, Layout
from gradwire.aggregator.xdp.program import (
    ADJUST_TAIL,
    DROP,
    PASS,
    SLOTS_MAP,
    STREAMS_MAP,
    TURNS_MAP,
    WORKERS_MAP,
    find,
)

_STORE = 190


def emit(layout: Layout) -> Assembler:
    """Return the program for a layout."""
    return _Program(layout).code


class _Program:
    """The program as it is appended to, top down."""

    def __init__(self, layout: Layout) -> None:
        self.code, self.layout = Assembler("xdp"), layout
        code = self.code
        self._key_room = code.room(8)
        frame = self._frame(HEADER_BYTES + PACKET_HEADER_BYTES)
        answer = self._pointer(8)
        with code.when(answer.at(ANSWER.size) > self._pointer(0)):
            code.leave(DROP)
        slot, buffer = code.load(answer, 24, 4), code.load(answer, 28, 2)
        entry = self._find(STREAMS_MAP, get(code, frame.at(HEADER_BYTES), "stream"))
        value = self._find(SLOTS_MAP, slot)
        record = self._find(WORKERS_MAP, code.draw(self._find(TURNS_MAP, slot), 0))
        unknown = code.load(record, INTERFACE_AT, 4).equals(0).as_number()  # it has sent nothing
        with code.when((unknown | (buffer >= layout.num_buffers).as_number()).differs(0)):
            code.leave(DROP)
        kept, width = value.at(layout.buffers + 8).at(buffer * layout.buffer_bytes), code.load(entry, 12, 4)
        for each, _ in layout.sizes:
            with code.when(width.equals(each)):
                self._send(frame, kept, layout.result_bytes(each), record)
        code.leave(DROP)

    def _send(self, frame: Register, kept: Register, length: int, record: Register) -> None:
        code, layout = self.code, self.layout
        server, whole = server_in(code, frame), HEADER_BYTES + length + layout.guard.trailer_bytes
        present = code.load(code.context, 4, 4) - code.load(code.context, 0, 4)
        with code.when(code.call(ADJUST_TAIL, code.context, code.number(whole) - present).differs(0)):
            code.leave(DROP)
        code.call(_STORE, code.context, HEADER_BYTES, kept, length)
        frame = self._frame(whole)
        write_lengths(code, frame, length + layout.guard.trailer_bytes)
        address_to(code, frame, layout.port, server, record)
        sign(code, layout, frame.at(HEADER_BYTES), length, record)
        code.leave(PASS)

    # -- small things ----------------------------------------------------------------------------------------

    def _pointer(self, offset: int) -> Register:
        return self.code.load(self.code.context, offset, 4).as_pointer()

    def _frame(self, num_bytes: int) -> Register:
        """Return a pointer to the frame, once it is certain that it has `num_bytes` bytes."""
        frame, end = self._pointer(0), self._pointer(4)
        with self.code.when(frame.at(num_bytes) > end):
            self.code.leave(DROP)
        return frame

    def _find(self, name: str, key: Register | int) -> Register:
        return find(self.code, self._key_room, name, key, DROP)
