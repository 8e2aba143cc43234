"""Rotated blocks quantized to the values of a table, and accumulated table values back to elements.

A table holds integers, ascending from 0; an index selects one. Quantization is unbiased: z between two neighboring
values v < w becomes w if z - v > u (w - v), else v, where u = (r + 1/2) / 65536 with 16 random bits r. Ranks add up
table values. The centered sum of n payloads consists of integers, or of halves of odd integers, and its Hadamard
transform of integers: all is exact in float32 while n times half of the last value times the block length is at most
2^24.
"""
# Shapes: N elements, P = N with the last block padded, G blocks

from __future__ import annotations

import numpy as np

from gradwire.kernels.blocks import INDEX_CHUNK, BlockLayout, expect_blocks, expect_index_bits, index_bytes, widths
from gradwire.kernels.layout import SUM_LANES, ceil_div, expect_size
from gradwire.kernels.reference.bits import pack_bits, unpack_bits
from gradwire.kernels.reference.elements import as_float32
from gradwire.kernels.reference.hadamard import hadamard
from gradwire.kernels.reference.random import random16

_LARGEST = np.finfo(np.float32).max
_RANDOM_STEP, _HALF = np.float32(2**-16), np.float32(0.5)


def block_square_sums(x: np.ndarray, block: int, out: np.ndarray) -> None:
    """Write the sum of squares of each block to `out`, float64[G].

    64 running sums are added by halving. `block` is a multiple of 64; the last block may be shorter.
    """
    expect_size("block_square_sums", "out", out, ceil_div(x.size, block))
    values = np.zeros(out.size * block)
    values[: x.size] = as_float32(x)
    with np.errstate(all="ignore"):
        rows = (values * values).reshape(out.size, block // SUM_LANES, SUM_LANES)
        lanes = np.zeros((out.size, SUM_LANES))
        for row in range(rows.shape[1]):
            lanes = lanes + rows[:, row]
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
    out[:] = lanes[:, 0]


def block_extremes(
    x: np.ndarray, blocks: BlockLayout, units: np.ndarray, work: np.ndarray, low: np.ndarray, high: np.ndarray
) -> None:
    """Write the smallest and the largest coordinate of each block to `low` and `high`, float32[G].

    Coordinates are those of `encode_indices`. NaN is ignored. For a block of nothing but NaN, `low` is infinity and
    `high` minus infinity.
    """
    expect_blocks("block_extremes", blocks, x.size, work, units, low, high)
    y = _coordinates(x, blocks, units)
    for b in range(blocks.num_blocks):
        part = y[b * blocks.block : (b + 1) * blocks.block]
        zero = np.float32(0)  # turns -0 into +0
        low[b] = np.fmin.reduce(part, initial=np.float32(np.inf)) + zero
        high[b] = np.fmax.reduce(part, initial=np.float32(-np.inf)) + zero


def encode_indices(
    x: np.ndarray,
    blocks: BlockLayout,
    units: np.ndarray,
    lows: np.ndarray,
    rates: np.ndarray,
    table: np.ndarray,
    bits: int,
    key: int,
    first: int,
    work: np.ndarray,
    out: np.ndarray,
    factors: np.ndarray,
    bases: np.ndarray,
    residual: np.ndarray | None = None,
) -> None:
    """Rotate x in blocks, quantize the coordinates to the values of a table, and pack the indices.

    Args:
        x: Gradient, N elements.
        blocks: Blocks and rotation.
        units: float32[G], the factor of each block's elements before rotation.
        lows, rates: float32[G]. Coordinate y becomes z = (y - low) * rate in units of the table, clamped to
            [0, last value].
        table: uint32[2^bits], ascending from 0, below 2^16.
        bits: Bits per index, 1 to 8.
        key: 64-bit key of the random stream.
        first: Global element index of x[0] in the stream.
        work: float32[blocks.work_size], overwritten.
        out: uint8[index_bytes(P, bits)].
        factors, bases: Arguments of `finalize_blocks` for one payload; used for the residual.
        residual: float32[N], receives x minus the decoded values, clamped to finite floats. May be the same array as
            x, or None.
    """
    expect_blocks("encode_indices", blocks, x.size, work, units, lows, rates, factors, bases)
    expect_index_bits("encode_indices", bits, table)
    expect_size("encode_indices", "out", out, index_bytes(blocks.padded, bits))
    values = table.astype(np.float32)
    with np.errstate(all="ignore"):
        z = (_coordinates(x, blocks, units) - _spread(lows, blocks)) * _spread(rates, blocks)
        z = np.where(z > 0, z, np.float32(0))  # NaN becomes 0
        z = np.where(z < values[-1], z, values[-1])
        below = np.searchsorted(values, z, side="right") - 1
        gaps = np.append(np.diff(values), np.float32(0))
        drawn = np.empty(blocks.padded, np.uint16)
        random16(key, first, drawn)
        u = (drawn.astype(np.float32) + _HALF) * _RANDOM_STEP
        indices = (below + (z - values[below] > u * gaps[below])).astype(np.uint8)
    at = 0
    for start in range(0, indices.size, INDEX_CHUNK):
        chunk, shift = indices[start : start + INDEX_CHUNK], 0
        for width in widths(bits):
            count = ceil_div(chunk.size * width, 8)
            pack_bits(chunk >> np.uint8(shift), width, out[at : at + count])
            at, shift = at + count, shift + width
    if residual is not None:
        expect_size("encode_indices", "residual", residual, x.size)
        halves = np.full(blocks.num_blocks, values[-1] / 2, np.float32)
        sent = np.empty(x.size, np.float32)
        finalize_blocks(table[indices], blocks, halves, factors, bases, work, sent)
        with np.errstate(all="ignore"):
            residual[:] = _finite(as_float32(x) - sent)


def lookup_indices(
    packed: np.ndarray, bits: int, table: np.ndarray, accumulator: np.ndarray, accumulate: bool = False
) -> None:
    """Write (or add) the table values of packed indices to the accumulator, uint8[P], uint16[P] or uint32[P].

    The caller chooses an accumulator wide enough for the sum; a narrower one wraps. Padding bits are ignored.
    """
    expect_index_bits("lookup_indices", bits, table)
    expect_size("lookup_indices", "packed", packed, index_bytes(accumulator.size, bits))
    at = 0
    for start in range(0, accumulator.size, INDEX_CHUNK):
        part, shift = accumulator[start : start + INDEX_CHUNK], 0
        indices = np.zeros(part.size, np.uint8)
        for width in widths(bits):
            count, plane = ceil_div(part.size * width, 8), np.empty(part.size, np.uint8)
            unpack_bits(packed[at : at + count], width, plane)
            indices |= plane << np.uint8(shift)
            at, shift = at + count, shift + width
        values = table[indices].astype(accumulator.dtype)
        part[:] = part + values if accumulate else values


def finalize_blocks(
    accumulator: np.ndarray,
    blocks: BlockLayout,
    halves: np.ndarray,
    factors: np.ndarray,
    bases: np.ndarray,
    work: np.ndarray,
    out: np.ndarray,
    accumulate: bool = False,
) -> None:
    """Turn accumulated table values into elements: center, transform, scale, flip signs.

    Args:
        accumulator: Unsigned integers, P of them.
        blocks: Blocks and rotation.
        halves: float32[G], subtracted from each integer.
        factors: float32[G], the factor of each block after the transform.
        bases: float32[G], then added to the first coordinate of a rotated block, or to all of one that is not.
        work: float32[blocks.work_size], overwritten.
        out: float32[N]. Results are clamped to finite floats.
        accumulate: Whether to add to `out`.
    """
    expect_blocks("finalize_blocks", blocks, out.size, work, halves, factors, bases)
    expect_size("finalize_blocks", "accumulator", accumulator, blocks.padded)
    with np.errstate(all="ignore"):
        values = accumulator.astype(np.float32) - _spread(halves, blocks)
        if blocks.rotated:
            _transform(values, blocks)
            added = np.zeros(blocks.padded, np.float32)
            added[:: blocks.block] = bases
        else:
            added = _spread(bases, blocks)
        values = _flipped(values * _spread(factors, blocks) + added, blocks)[: out.size]
        values = _finite(values)
        out[:] = out + values if accumulate else values


def _finite(values: np.ndarray) -> np.ndarray:
    """Clamp to finite floats; NaN becomes the smallest."""
    values = np.where(values > -_LARGEST, values, -_LARGEST)
    return np.where(values < _LARGEST, values, _LARGEST)


def _spread(values: np.ndarray, blocks: BlockLayout) -> np.ndarray:
    return np.repeat(values, blocks.lengths())


def _coordinates(x: np.ndarray, blocks: BlockLayout, units: np.ndarray) -> np.ndarray:
    """Elements times units, rotated: float32[P]."""
    y = np.zeros(blocks.padded, np.float32)
    with np.errstate(all="ignore"):
        y[: x.size] = as_float32(x)
        y = _flipped(y * _spread(units, blocks), blocks)
    if blocks.rotated:
        _transform(y, blocks)
    return y


def _flipped(y: np.ndarray, blocks: BlockLayout) -> np.ndarray:
    if not blocks.rotated:
        return y
    place = blocks.shift + np.arange(y.size)
    flips = (blocks.signs[place // 32] >> (place % 32).astype(np.uint32)) & np.uint32(1)
    return (y.view(np.uint32) ^ (flips << np.uint32(31))).view(np.float32)


def _transform(y: np.ndarray, blocks: BlockLayout) -> None:
    whole = blocks.size // blocks.block * blocks.block
    hadamard(y[:whole], blocks.block)
    if y.size > whole:
        hadamard(y[whole:], y.size - whole)
