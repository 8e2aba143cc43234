"""Ascending positions in few bits: offsets within blocks of 2^l elements with a unary count per block, or a bitmap.

The numbers of elements and of positions determine the form and l: the fewest bytes, and the bitmap if equal. Nothing on
the wire says which, and each list has one encoding.

Blocks: first a bit string of K ones and B zeros. Each block of 2^l elements contributes one 1 for each of its
positions, then a 0. Then, from a new byte on, the l low bits of each position. This takes about 2 + log2(N / K) bits
per position, half a bit above the entropy of random positions. Bitmap: one bit per element. Bits are filled in from the
least significant of each byte; padding bits are zero.

Source: Elias 1974 and Fano 1971 (quasi-succinct lists).
"""
# Shapes: N = elements, K = positions, B = blocks

from __future__ import annotations

import numpy as np

from gradwire.kernels.layout import ceil_div, expect_size

BITMAP = -1
MOST_LOW_BITS = 40


def low_bits(size: int, count: int) -> int:
    """The smallest l with the fewest bytes, or `BITMAP` if a bitmap takes no more."""
    best, fewest = BITMAP, ceil_div(size, 8)
    for low in range(1, MOST_LOW_BITS + 1):
        num_bytes = ceil_div(count + ceil_div(size, 1 << low), 8) + ceil_div(count * low, 8)
        if num_bytes < fewest:
            best, fewest = low, num_bytes
    return best


def positions_bytes(size: int, count: int) -> int:
    """Bytes of `count` of `size` positions. More positions never take fewer bytes."""
    if count == 0:
        return 0
    low = low_bits(size, count)
    if low == BITMAP:
        return ceil_div(size, 8)
    return ceil_div(count + ceil_div(size, 1 << low), 8) + ceil_div(count * low, 8)


def pack_positions(index: np.ndarray, size: int, out: np.ndarray) -> None:
    """Pack strictly ascending positions below `size` into `out`, uint8[positions_bytes(size, K)]."""
    expect_size("pack_positions", "out", out, positions_bytes(size, index.size))
    if index.size == 0:
        return
    low, index = low_bits(size, index.size), index.astype(np.int64)
    if low == BITMAP:
        out[:] = _packed(_ones(index, size))
        return
    upper = _ones((index >> low) + np.arange(index.size), index.size + ceil_div(size, 1 << low))
    lower = (index[:, None] >> np.arange(low)) & 1
    out[:] = np.concatenate([_packed(upper), _packed(lower.reshape(-1))])


def unpack_positions(packed: np.ndarray, size: int, index: np.ndarray) -> bool:
    """Undo `pack_positions`; return False, with `index` unspecified, if the bytes are no encoding of K positions."""
    count = index.size
    if count > size or packed.size != positions_bytes(size, count):
        return False
    if count == 0:
        return True
    low = low_bits(size, count)
    num_upper = packed.size if low == BITMAP else ceil_div(count + ceil_div(size, 1 << low), 8)
    found = np.flatnonzero(np.unpackbits(packed[:num_upper], bitorder="little"))
    if found.size != count:
        return False
    if low != BITMAP:
        bits = np.unpackbits(packed[num_upper:], bitorder="little").astype(np.int64)
        if bits[count * low :].any():
            return False
        lower = bits[: count * low].reshape(count, low) @ (1 << np.arange(low))
        found = (found - np.arange(count)) << low | lower
    if (found[1:] <= found[:-1]).any() or found[-1] >= size:
        return False
    index[:] = found
    return True


def _ones(places: np.ndarray, length: int) -> np.ndarray:
    bits = np.zeros(length, np.uint8)
    bits[places] = 1
    return bits


def _packed(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits.astype(np.uint8), bitorder="little")
