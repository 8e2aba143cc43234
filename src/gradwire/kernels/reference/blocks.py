"""Rotated blocks quantized onto the values of a table, and integer lanes back to elements.

An index says which of the table's values, integers from 0 to its last, an element has. Coordinates are quantized
without bias: z between two neighboring values v < w becomes w where z - v > u (w - v), with u = (r + 1/2) / 65536 of
16 random bits r. Sums over ranks are sums of values; centered, of n payloads, they are integers or halves, and so is
their Hadamard transform: exact in float32 while n times half of the last value times the length of a block is below
2^23.
"""
# Shapes: N elements, P = N with the last block filled up, G blocks

from __future__ import annotations

import numpy as np

from gradwire.kernels.blocks import INDEX_CHUNK, BlockLayout, expect_index_bits, index_bytes, widths
from gradwire.kernels.layout import SUM_LANES, ceil_div, expect_size
from gradwire.kernels.reference.bits import pack_bits, unpack_bits
from gradwire.kernels.reference.elements import as_float32
from gradwire.kernels.reference.hadamard import hadamard
from gradwire.kernels.reference.random import random16

_LARGEST = np.finfo(np.float32).max
_RANDOM_STEP, _HALF = np.float32(2**-16), np.float32(0.5)


def block_square_sums(x: np.ndarray, block: int, out: np.ndarray) -> None:
    """Write the sum of squares of each block to float64 `out`.

    Added in 64 running lanes, then halves. `block` is a multiple of 64; the last one may be shorter.
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
    """Write the least and the largest coordinate of each block to float32 `low` and `high`.

    Coordinates are those of `encode_indices`. A NaN is passed over; of nothing else the least is infinite and the
    largest minus infinity.
    """
    y = _coordinates(x, blocks, units)
    for b in range(blocks.num_blocks):
        part = y[b * blocks.block : (b + 1) * blocks.block]
        zero = np.float32(0)  # makes a zero positive
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
    """Rotate x in blocks, quantize it to the values of a table, pack their indices.

    Args:
        x: gradient, N elements.
        blocks: how it is cut and rotated.
        units: float32[G]; elements are multiplied by their block's before they are rotated.
        lows, rates: float32[G]; coordinate y is z = (y - low) * rate, cut to [0, last value], in units of the table.
        table: uint32[2^bits], ascending from 0, below 2^16.
        bits: of an index, 1 to 8.
        key: 64-bit key of the random stream.
        first: global element index of x[0] in the stream.
        work: float32[blocks.work_size] to compute in.
        out: uint8[index_bytes(P, bits)].
        factors, bases: as `finalize_blocks` takes them, for one payload; for the residual.
        residual: float32[N] that takes x - what the indices are lowered to, cut to the finite floats; may be the same
            array as x. Or None.
    """
    _expect_blocks("encode_indices", blocks, x.size, units, lows, rates, factors, bases)
    expect_index_bits("encode_indices", bits, table)
    expect_size("encode_indices", "out", out, index_bytes(blocks.padded, bits))
    values = table.astype(np.float32)
    with np.errstate(all="ignore"):
        z = (_coordinates(x, blocks, units) - _spread(lows, blocks)) * _spread(rates, blocks)
        z = np.where(z > 0, z, np.float32(0))  # takes NaN to 0
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
    packed: np.ndarray, bits: int, table: np.ndarray, lanes: np.ndarray, accumulate: bool = False
) -> None:
    """Write (or add) the table's values of packed indices to lanes, uint8[P], uint16[P] or uint32[P].

    Exact as long as the lanes are wide enough, which the caller sees to; else it wraps. Padding bits are not looked at.
    """
    expect_index_bits("lookup_indices", bits, table)
    expect_size("lookup_indices", "packed", packed, index_bytes(lanes.size, bits))
    at = 0
    for start in range(0, lanes.size, INDEX_CHUNK):
        part, shift = lanes[start : start + INDEX_CHUNK], 0
        indices = np.zeros(part.size, np.uint8)
        for width in widths(bits):
            count, plane = ceil_div(part.size * width, 8), np.empty(part.size, np.uint8)
            unpack_bits(packed[at : at + count], width, plane)
            indices |= plane << np.uint8(shift)
            at, shift = at + count, shift + width
        values = table[indices].astype(lanes.dtype)
        part[:] = part + values if accumulate else values


def finalize_blocks(
    lanes: np.ndarray,
    blocks: BlockLayout,
    halves: np.ndarray,
    factors: np.ndarray,
    bases: np.ndarray,
    work: np.ndarray,
    out: np.ndarray,
    accumulate: bool = False,
) -> None:
    """Turn lanes back into elements: center, transform, scale, flip signs.

    Args:
        lanes: unsigned integers, P of them.
        blocks: how the range was cut and rotated.
        halves: float32[G], what is taken off each lane.
        factors: float32[G], by which transformed lanes are multiplied.
        bases: float32[G], what is added to the first coordinate of each block after that if rotated, else to all.
        work: float32[blocks.work_size] to compute in.
        out: float32[N]; results are cut to the finite floats.
        accumulate: add to `out`.
    """
    _expect_blocks("finalize_blocks", blocks, out.size, halves, factors, bases)
    expect_size("finalize_blocks", "lanes", lanes, blocks.padded)
    with np.errstate(all="ignore"):
        values = lanes.astype(np.float32) - _spread(halves, blocks)
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
    """Cut to the finite floats; a NaN to the least of them."""
    values = np.where(values > -_LARGEST, values, -_LARGEST)
    return np.where(values < _LARGEST, values, _LARGEST)


def _expect_blocks(kernel: str, blocks: BlockLayout, size: int, *arrays: np.ndarray) -> None:
    if blocks.size != size:
        raise ValueError(f"Expected blocks of {size} elements, got {blocks.size} (in {kernel}).")
    for array in arrays:
        expect_size(kernel, "values a block", array, blocks.num_blocks)


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
