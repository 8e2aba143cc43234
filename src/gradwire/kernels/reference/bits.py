"""Small integers packed into bytes.

The layout is *planar*: of S bytes, byte i holds elements i, i + S, i + 2 S, ... from its least significant bits up.
Packing is then shifts and ors of whole vectors. Padding bits are 0.
"""
# Shapes: N elements, S = ceil(N * bits / 8) bytes

from __future__ import annotations

import numpy as np

from gradwire.kernels.layout import ceil_div, expect_bits, expect_size


def pack_bits(q: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Pack the lowest `bits` bits of each element of q, uint8[N], into `out`, uint8[S]."""
    per = expect_bits("pack_bits", bits)
    expect_size("pack_bits", "out", out, ceil_div(q.size, per))
    planes = np.zeros(per * out.size, np.uint8)
    planes[: q.size] = q & np.uint8(2**bits - 1)
    out[:] = 0
    for plane, values in enumerate(planes.reshape(per, out.size)):
        out |= values << np.uint8(plane * bits)


def unpack_bits(packed: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Undo `pack_bits` into `out`, uint8[N]. Padding bits are ignored."""
    per = expect_bits("unpack_bits", bits)
    expect_size("unpack_bits", "packed", packed, ceil_div(out.size, per))
    mask = np.uint8(2**bits - 1)
    planes = [(packed >> np.uint8(plane * bits)) & mask for plane in range(per)]
    out[:] = np.concatenate(planes)[: out.size]
