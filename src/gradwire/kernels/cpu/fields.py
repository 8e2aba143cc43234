"""Numbers of few bits, packed field by field: inner loops of `floats`. Layout: `float_format`."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import LANES
from gradwire.kernels.cpu.lanes import convert, convert_like, splat
from gradwire.kernels.cpu.vector import load, store, store_until, u8, u32


@kernel
def fields_bytes(count, width):
    """Compiled `field_bytes`."""
    size = (width >> 3) * count
    for field in (4, 2, 1):
        if width & field:
            size += (count * field + 7) >> 3
    return size


@kernel
def pack_fields(values, width, out, at):
    """Pack all of `values` in `width` bits each into out[at:]; return where they end."""
    count, shift = values.size, 0
    while width - shift >= 8:
        for i in range(0, count, LANES):
            store_until(out, at + i, at + count, convert(load(values, i, LANES) >> shift, u8))
        at, shift = at + count, shift + 8
    for field in (4, 2, 1):
        if width & field:
            size, per, mask = (count * field + 7) >> 3, 8 // field, (1 << field) - 1
            for i in range(0, size, LANES):
                packed = convert((load(values, i, LANES) >> shift) & mask, u8)
                for plane in range(1, per):
                    more = convert((load(values, plane * size + i, LANES) >> shift) & mask, u8)
                    packed = packed | (more << (plane * field))
                store_until(out, at + i, at + size, packed)
            at, shift = at + size, shift + field
    return at


@kernel
def unpack_fields(body, at, width, shift, values):
    """Fill `values` with the numbers packed at body[at:], shifted left by `shift`.

    Returns False if padding bits are not 0. All bytes must lie inside `body`.
    """
    count, whole = values.size, width >> 3
    for i in range(0, count, LANES):
        found = splat(np.uint32(0), LANES)
        for byte in range(whole):
            found = found | (convert(load(body, at + byte * count + i, LANES), u32) << (8 * byte + shift))
        store(values, i, convert_like(found, values))
    at, shift = at + whole * count, shift + 8 * whole
    for field in (4, 2, 1):
        if width & field:
            size, per, mask = (count * field + 7) >> 3, 8 // field, (1 << field) - 1
            for plane in range(per):
                start, end = plane * size, min((plane + 1) * size, count)
                for i in range(start, end, LANES):
                    more = convert((load(body, at + i - start, LANES) >> (plane * field)) & mask, u32)
                    found = convert(load(values, i, LANES), u32) | (more << shift)
                    store_until(values, i, end, convert_like(found, values))
            for place in range(count, per * size):
                plane = place // size
                if (np.int64(body[at + place - plane * size]) >> (plane * field)) & mask != 0:
                    return False
            at, shift = at + size, shift + field
    return True
