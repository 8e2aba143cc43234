"""Signs and small integers packed into bytes, and back.

Signs: bit i % 8 of byte i // 8, least significant first, is 1 unless x[i] < 0; a NaN gives 1. Small integers
are *planar*: with S bytes, byte i holds elements i, i + S, i + 2 S, ... from its least significant bits up,
so that packing is shifts and ors of whole vectors. Padding bits are 0; elements past the end count as 0.
"""
# Shapes: N elements, W ranks, S = ceil(N * bits / 8) bytes

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.kernels.layout import ceil_div, expect_bits, expect_same_ranks, expect_size
from gradwire.kernels.reference.elements import as_float32


def pack_signs(x: np.ndarray, out: np.ndarray) -> None:
    """Write the signs of x to `out`, uint8[ceil(N/8)]."""
    expect_size("pack_signs", "out", out, ceil_div(x.size, 8))
    out[:] = np.packbits(~(as_float32(x) < 0), bitorder="little")


def _levels(packed: np.ndarray, low: float, high: float, size: int) -> np.ndarray:
    signs = np.unpackbits(packed, count=size, bitorder="little")
    return np.where(signs, np.float32(high), np.float32(low))


def unpack_signs(packed: np.ndarray, low: float, high: float, out: np.ndarray, accumulate: bool = False) -> None:
    """Write (or add) `high` where the bit is 1 and `low` where it is 0. Padding bits are not looked at."""
    expect_size("unpack_signs", "packed", packed, ceil_div(out.size, 8))
    levels = _levels(packed, low, high, out.size)
    with np.errstate(all="ignore"):
        out[:] = out + levels if accumulate else levels


def encode_signs(x: np.ndarray, low: float, high: float, out: np.ndarray, residual: np.ndarray) -> None:
    """Pack signs and write x minus what they decode to. `residual` may be the same array as x."""
    expect_size("encode_signs", "residual", residual, x.size)
    pack_signs(x, out)
    with np.errstate(all="ignore"):
        residual[:] = as_float32(x) - _levels(out, low, high, x.size)


def unpack_signs_sum(packed: Sequence[np.ndarray], low: np.ndarray, high: np.ndarray, out: np.ndarray) -> None:
    """Write the sum over ranks of what each rank's signs decode to, added from 0.0 in rank order.

    Args:
        packed: one uint8[ceil(N/8)] a rank.
        low: float32[W].
        high: float32[W].
        out: float32[N].
    """
    expect_same_ranks("unpack_signs_sum", packed, low, high)
    out[:] = 0
    for rank, signs in enumerate(packed):
        unpack_signs(signs, low[rank], high[rank], out, accumulate=True)


def pack_bits(q: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Pack the `bits` lowest bits of each uint8 of q into `out`, uint8[S]."""
    per = expect_bits("pack_bits", bits)
    expect_size("pack_bits", "out", out, ceil_div(q.size, per))
    planes = np.zeros(per * out.size, np.uint8)
    planes[: q.size] = q & np.uint8(2**bits - 1)
    out[:] = 0
    for plane, values in enumerate(planes.reshape(per, out.size)):
        out |= values << np.uint8(plane * bits)


def unpack_bits(packed: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Undo `pack_bits` into `out`, uint8[N]. Padding bits are not looked at."""
    per = expect_bits("unpack_bits", bits)
    expect_size("unpack_bits", "packed", packed, ceil_div(out.size, per))
    mask = np.uint8(2**bits - 1)
    planes = [(packed >> np.uint8(plane * bits)) & mask for plane in range(per)]
    out[:] = np.concatenate(planes)[: out.size]
