"""Reductions of a gradient to a few numbers. Contracts: `reference.reduce`."""
# Shapes: N elements; a canonical sum is one vector of 64 float64

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import INFINITY_BITS, LANES, MAGNITUDE, as_input, load_f32
from gradwire.kernels.cpu.lanes import (
    bitcast,
    first_lane,
    lanes_below,
    largest_lane,
    mask_bits,
    maximum,
    popcount,
    select,
    splat,
    sum_lanes,
)
from gradwire.kernels.cpu.vector import f32, i32, load
from gradwire.kernels.layout import SUM_BLOCK, SUM_LANES, ceil_div, expect_size

_NAN = np.float32(np.nan)
# Levels of sums of sums: no memory holds 1024^4 elements.
LEVELS = 4


def magnitude_of(bits: int) -> np.float32:
    """The float32 with these bits; NaN instead of infinity."""
    return _NAN if bits >= INFINITY_BITS else np.int32(bits).view(np.float32)


@kernel
def largest_bits(x, start, end):
    """Bits of the largest magnitude of a range, of float32."""
    largest = splat(np.int32(0), LANES)
    for i in range(start, end, LANES):
        bits = bitcast(load_f32(x, i, LANES), i32) & MAGNITUDE
        largest = maximum(largest, select(lanes_below(end - i, LANES), bits, largest))
    return largest_lane(largest)


def abs_max(x: np.ndarray) -> np.float32:
    return magnitude_of(largest_bits(as_input(x), 0, x.size))


@kernel
def _block_abs_max(x, block, out):
    for b in range(out.size):
        bits = largest_bits(x, b * block, min(x.size, (b + 1) * block))
        out[b] = np.nan if bits >= INFINITY_BITS else first_lane(bitcast(splat(bits, 1), f32))


def block_abs_max(x: np.ndarray, block: int, out: np.ndarray) -> None:
    expect_size("block_abs_max", "out", out, ceil_div(x.size, block))
    _block_abs_max(as_input(x), block, out)


@kernel
def _count_nonfinite(x):
    count = 0
    for i in range(0, x.size, LANES):
        bits = bitcast(load_f32(x, i, LANES), i32) & MAGNITUDE
        count += popcount(mask_bits(bits >= INFINITY_BITS))
    return count


def count_nonfinite(x: np.ndarray) -> int:
    return int(_count_nonfinite(as_input(x)))


@kernel
def _sum_level(levels, start):
    total = splat(0.0, SUM_LANES)
    for i in range(start, start + SUM_BLOCK, SUM_LANES):
        total = total + load(levels, i, SUM_LANES)
    return sum_lanes(total)


@kernel
def push(levels, fill, level, value):
    """Append the sum of a block to a level. A full level becomes one value of the next."""
    while True:
        levels[level * SUM_BLOCK + fill[level]] = value
        fill[level] += 1
        if fill[level] < SUM_BLOCK:
            return
        value = _sum_level(levels, level * SUM_BLOCK)
        fill[level] = 0
        level += 1


@kernel
def finish(levels, fill):
    """Sum the values of all levels, lowest first, until one is left."""
    for level in range(LEVELS):
        above = 0
        for higher in range(level + 1, LEVELS):
            above += fill[higher]
        start = level * SUM_BLOCK
        if above == 0 and fill[level] <= 1:
            return levels[start] if fill[level] == 1 else 0.0
        if fill[level] > 0:
            levels[start + fill[level] : start + SUM_BLOCK] = 0.0
            push(levels, fill, level + 1, _sum_level(levels, start))
    return 0.0
