"""The program behind the copies: signs each for its worker on its way out, by the worker's key and the next number.

It takes up what `copies.py` has marked, of which it knows the worker by the mark. Everything else continues unchanged.
Nobody without CAP_NET_ADMIN can mark packets, and marks do not travel.
"""

from __future__ import annotations

from gradwire.aggregator.packet import PACKET_HEADER_BYTES
from gradwire.aggregator.xdp.assembler import Assembler
from gradwire.aggregator.xdp.copies import CONTINUE, DATA_AT, DROP, END_AT, LENGTH_AT, MARK_AT, PULL
from gradwire.aggregator.xdp.frames import HEADER_BYTES, KEY_BYTES, sign
from gradwire.aggregator.xdp.layout import MARK, MARK_MASK, Layout
from gradwire.aggregator.xdp.program import WORKERS_MAP, find


def emit(layout: Layout) -> Assembler:
    """Return the program for a layout."""
    code = Assembler("tc")
    key_room = code.room(8)
    mark = code.load(code.context, MARK_AT, 4)
    with code.when((mark & MARK_MASK).differs(MARK)):
        code.leave(CONTINUE)
    code.store(code.context, MARK_AT, 0, 4)
    record = find(code, key_room, WORKERS_MAP, mark & 0xFF, DROP)
    num_bytes = code.load(code.context, LENGTH_AT, 4)
    code.call(PULL, code.context, num_bytes)
    frame = code.load(code.context, DATA_AT, 4).as_pointer()
    end = code.load(code.context, END_AT, 4).as_pointer()
    results = {layout.result_bytes(width) for width, _ in layout.sizes}
    for length in sorted({PACKET_HEADER_BYTES, PACKET_HEADER_BYTES + KEY_BYTES, *results}):
        whole = HEADER_BYTES + length + layout.guard.trailer_bytes
        with code.when(num_bytes.equals(whole)):
            with code.when(frame.at(whole) > end):
                code.leave(DROP)
            sign(code, layout, frame.at(HEADER_BYTES), length, record)
            code.leave(CONTINUE)
    code.leave(DROP)
    return code
