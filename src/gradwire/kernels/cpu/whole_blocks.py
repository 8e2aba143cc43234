"""Whole blocks of 1,024 elements to 4-bit indices and back to the residual: `blocks.encode_indices` for THC's defaults.

A block is one chunk of indices and one group of random numbers. Each step of the algorithm therefore falls on whole
vectors, and a block takes two sweeps over 4 KiB in the cache, each with one load and one store of a vector:

1. Scale, flip signs, and transform: the eight levels within 256 elements.
2. The last two levels, between elements 256 and 512 apart; quantize; pack. The four vectors of these levels use the
   same half of the four random words of a counter, and give two vectors of bytes.

The residual takes two more: the inverse transform, whose last two levels go on to scaling, flipping and subtracting.

Measured with blocks in the cache, in processor cycles per 16 elements: 20, of which sweep 1 takes 5.5, random words 5,
and sweep 2 9; with the residual, 34. `blocks._encode` takes 41 and 65.
"""
# Shapes: N elements, G whole blocks

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from gradwire.kernels.blocks import INDEX_CHUNK
from gradwire.kernels.cpu.compile import inlined, kernel
from gradwire.kernels.cpu.elements import load_f32
from gradwire.kernels.cpu.hadamard import NEIGHBORS, transform_loaded, transform_neighbors
from gradwire.kernels.cpu.lanes import bitcast, bits_mask, convert, lanes_below, maximum, minimum, select, splat
from gradwire.kernels.cpu.lookup import ENTRIES, lookup
from gradwire.kernels.cpu.random import fill_group32
from gradwire.kernels.cpu.vector import f32, i32, load_inside, store_inside, u8, u32
from gradwire.kernels.layout import RANDOM32_GROUP, RANDOM_COUNTERS

BLOCK = INDEX_CHUNK
# With 16 or 64, encoding takes 1.05 or 1.15 times as long: dependent instructions wait, or registers run out.
LANES = 32
_LARGEST = np.float32(np.finfo(np.float32).max)
_SIGN = np.uint32(1 << 31)
_LOW_HALF = np.uint32(0xFFFF)
_2_23 = np.uint32(0x4B000000)  # bits of 2^23: the last bit of a float32 there is 1
_2_23_LESS_HALF = np.float32(2**23 - 0.5)


class Cells(NamedTuple):
    """A table of 16 values, whose range is divided into up to 16 cells of 2^shift integers.

    Attributes:
        floats: Values, gaps above them times 2^-16, and the value inside each cell, or infinity: float32[48].
        integers: Index of the last value up to the start of each cell, and ones: int32[16 + LANES].
        shift: Of an integer to its cell.
    """

    floats: np.ndarray
    integers: np.ndarray
    shift: int


@functools.lru_cache(maxsize=64)
def cells_of(table: bytes) -> Cells | None:
    """The cells of a table, given as the bytes of uint32[16], or None if a cell has more than one value inside.

    Without such cells, as in the tables that `thc` chooses, two lookups by the cell and one comparison find an index.
    """
    values = np.frombuffer(table, np.uint32)
    shift = max(0, int(values[-1]).bit_length() - 4)
    starts = np.arange(ENTRIES) << shift
    below = np.searchsorted(values, starts, side="right") - 1
    num_inside = np.searchsorted(values, starts + (1 << shift), side="left") - 1 - below
    if num_inside.max() > 1:
        return None
    gaps = np.append(np.diff(values), 0) * 2**-16
    inside = np.where(num_inside, values[np.minimum(below + 1, ENTRIES - 1)], np.inf)
    floats, integers = np.concatenate([values, gaps, inside]), np.append(below, np.ones(LANES))
    return Cells(floats.astype(np.float32), integers.astype(np.int32), shift)


@inlined
def _last_levels(work, j):
    """The coordinates j + 256 k, k from 0 to 3: the levels between elements 256 and 512 apart."""
    a, b = load_inside(work, j, LANES), load_inside(work, j + NEIGHBORS, LANES)
    c, d = load_inside(work, j + 2 * NEIGHBORS, LANES), load_inside(work, j + 3 * NEIGHBORS, LANES)
    a, b, c, d = a + b, a - b, c + d, c - d
    return a + c, b + d, a - c, b - d


# -- indices -------------------------------------------------------------------------------------------------------


@inlined
def _drawn(words, at, shift):
    """16 random bits plus 1/2. The bits are placed below those of 2^23, which converts them to a float."""
    bits = (load_inside(words, at, LANES) >> shift) & _LOW_HALF
    return bitcast(bits | _2_23, f32) - _2_23_LESS_HALF


@inlined
def _index(y, drawn, low, rate, top, shift, values, gaps, inside, below, ones):
    """Index of the value that each coordinate is rounded to.

    `ones` comes from memory. LLVM would turn the choice between `index` and `index` + 1 into two instructions; with an
    unknown vector it is one masked addition. This made the second sweep 10 % faster.
    """
    z = (y - low) * rate
    z = minimum(maximum(z, splat(np.float32(0), LANES)), splat(top, LANES))  # NaN becomes 0
    cell = convert(z, i32) >> shift
    index = lookup(below, cell)
    index = select(z >= lookup(inside, cell), index + ones, index)
    above = z - lookup(values, index) > drawn * lookup(gaps, index)
    return select(above, index + ones, index)


@kernel
def _quantize(work, low, rate, top, words, cells, out, at, keep):
    """Sweep 2. With `keep`, also write the centered values to `work`."""
    floats, integers, shift = cells
    values, gaps, inside = load_inside(floats, 0, 16), load_inside(floats, 16, 16), load_inside(floats, 32, 16)
    grid = low, rate, top, shift, values, gaps, inside, load_inside(integers, 0, 16), load_inside(integers, 16, LANES)
    center = top * np.float32(0.5)
    for half in range(2):
        bits = np.uint32(16 * half)
        for v in range(0, RANDOM_COUNTERS, LANES):
            j = v + half * RANDOM_COUNTERS
            y0, y1, y2, y3 = _last_levels(work, j)
            i0 = _index(y0, _drawn(words, v, bits), *grid)
            i2 = _index(y2, _drawn(words, v + 2 * RANDOM_COUNTERS, bits), *grid)
            store_inside(out, at + j, convert(i0 | (i2 << 4), u8))
            i1 = _index(y1, _drawn(words, v + RANDOM_COUNTERS, bits), *grid)
            i3 = _index(y3, _drawn(words, v + 3 * RANDOM_COUNTERS, bits), *grid)
            store_inside(out, at + j + NEIGHBORS, convert(i1 | (i3 << 4), u8))
            if keep:
                store_inside(work, j, lookup(values, i0) - center)
                store_inside(work, j + NEIGHBORS, lookup(values, i1) - center)
                store_inside(work, j + 2 * NEIGHBORS, lookup(values, i2) - center)
                store_inside(work, j + 3 * NEIGHBORS, lookup(values, i3) - center)


# -- residual ------------------------------------------------------------------------------------------------------


@inlined
def _finite(values):
    return minimum(maximum(values, splat(-_LARGEST, LANES)), splat(_LARGEST, LANES))


@inlined
def _subtract(x, place, sent, factor, added, signs, residual):
    """Scale and flip what was sent, and write the difference of 32 elements."""
    flips = bits_mask(signs[place // 32])
    mask = select(flips, splat(_SIGN, LANES), splat(np.uint32(0), LANES))
    sent = bitcast(bitcast(sent * factor + added, u32) ^ mask, f32)
    store_inside(residual, place, _finite(load_f32(x, place, LANES) - _finite(sent)))


@kernel
def _update_residual(x, start, work, factor, base, signs, residual):
    for j in range(0, BLOCK, NEIGHBORS):
        transform_neighbors(work, j, 256)
    none = splat(np.float32(0), LANES)
    added = select(lanes_below(1, LANES), splat(base, LANES), none)
    for j in range(0, NEIGHBORS, LANES):
        y0, y1, y2, y3 = _last_levels(work, j)
        _subtract(x, start + j, y0, factor, added, signs, residual)
        _subtract(x, start + j + NEIGHBORS, y1, factor, none, signs, residual)
        _subtract(x, start + j + 2 * NEIGHBORS, y2, factor, none, signs, residual)
        _subtract(x, start + j + 3 * NEIGHBORS, y3, factor, none, signs, residual)
        added = none


# -- encode --------------------------------------------------------------------------------------------------------


@kernel
def _encode(
    x, num_blocks, units, lows, rates, signs, masks, cells, key_0, key_1, group, work, out, top, factors, bases,
    residual, keep,
):  # fmt: skip
    words = np.empty(RANDOM32_GROUP, np.uint32)
    for b in range(num_blocks):
        start = b * BLOCK
        for j in range(0, BLOCK, NEIGHBORS):
            transform_loaded(x, start + j, units[b], masks, (start + j) // 16, work, j)
        fill_group32(key_0, key_1, group + b, words, np.int64(0))
        _quantize(work, lows[b], rates[b], top, words, cells, out, start // 2, keep)
        if keep:
            _update_residual(x, start, work, factors[b], bases[b], signs, residual)


def encode(
    x: np.ndarray,
    num_blocks: int,
    units: np.ndarray,
    lows: np.ndarray,
    rates: np.ndarray,
    signs: np.ndarray,
    cells: Cells,
    keys: tuple[np.uint32, np.uint32],
    first: int,
    work: np.ndarray,
    out: np.ndarray,
    top: np.float32,
    factors: np.ndarray,
    bases: np.ndarray,
    residual: np.ndarray | None,
) -> None:
    """Encode the first `num_blocks` blocks of `x`; see `blocks.encode_indices`.

    Args:
        signs: The first bit flips x[0].
        first: Global element of x[0], a multiple of 1,024.
    """
    _encode(
        x, num_blocks, units, lows, rates, signs, signs.view(np.uint16), tuple(cells), *keys, first // BLOCK, work, out,
        top, factors, bases, work[:0] if residual is None else residual, residual is not None,
    )  # fmt: skip
