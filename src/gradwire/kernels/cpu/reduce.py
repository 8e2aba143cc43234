"""Reductions of a gradient to a few numbers. Mirrors `reference.reduce`, where the contracts stand."""
# Shapes: N elements; a canonical sum is one vector of 64 float64

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import INFINITY_BITS, LANES, MAGNITUDE, as_input, load_f32
from gradwire.kernels.cpu.lanes import (
    bitcast,
    convert,
    first_lane,
    lanes_below,
    largest_lane,
    mask_bits,
    maximum,
    minimum,
    popcount,
    select,
    smallest_lane,
    splat,
    sum_lanes,
)
from gradwire.kernels.cpu.vector import f32, f64, i32, load
from gradwire.kernels.layout import SUM_BLOCK, SUM_LANES, ceil_div, expect_size

_NAN = np.float32(np.nan)
# Levels of sums of sums: 1024^4 elements are more than memory holds.
LEVELS = 4


def magnitude_of(bits: int) -> np.float32:
    """The float32 of these bits; NaN in place of infinity."""
    return _NAN if bits >= INFINITY_BITS else np.int32(bits).view(np.float32)


@kernel
def _largest_bits(x, start, end):
    largest = splat(np.int32(0), LANES)
    for i in range(start, end, LANES):
        bits = bitcast(load_f32(x, i, LANES), i32) & MAGNITUDE
        largest = maximum(largest, select(lanes_below(end - i, LANES), bits, largest))
    return largest_lane(largest)


def abs_max(x: np.ndarray) -> np.float32:
    return magnitude_of(_largest_bits(as_input(x), 0, x.size))


@kernel
def _block_abs_max(x, block, out):
    for b in range(out.size):
        bits = _largest_bits(x, b * block, min(x.size, (b + 1) * block))
        out[b] = np.nan if bits >= INFINITY_BITS else first_lane(bitcast(splat(bits, 1), f32))


def block_abs_max(x: np.ndarray, block: int, out: np.ndarray) -> None:
    expect_size("block_abs_max", "out", out, ceil_div(x.size, block))
    _block_abs_max(as_input(x), block, out)


@kernel
def _min_max_keys(x):
    smallest = splat(np.int32(MAGNITUDE), LANES)
    largest = splat(np.int32(-MAGNITUDE - 1), LANES)
    for i in range(0, x.size, LANES):
        bits = bitcast(load_f32(x, i, LANES), i32)
        # Two's complement integers in the order of the floats, -0.0 before 0.0.
        keys = bits ^ ((bits >> 31) & MAGNITUDE)
        inside = lanes_below(x.size - i, LANES)
        smallest = minimum(smallest, select(inside, keys, smallest))
        largest = maximum(largest, select(inside, keys, largest))
    return smallest_lane(smallest), largest_lane(largest)


def min_max(x: np.ndarray) -> tuple[np.float32, np.float32]:
    if x.size == 0:
        return np.float32(0), np.float32(0)
    smallest, largest = _min_max_keys(as_input(x))
    if largest >= INFINITY_BITS or smallest < -INFINITY_BITS:
        return _NAN, _NAN
    return _float_of_key(smallest), _float_of_key(largest)


def _float_of_key(key: int) -> np.float32:
    return np.int32(key ^ MAGNITUDE if key < 0 else key).view(np.float32)


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
    """Append a block's sum to a level; a full level becomes one value of the next."""
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
    """Sum what the levels hold, lowest first, until one value is left."""
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


@kernel
def _sum(x, levels, fill):
    for start in range(0, x.size, SUM_BLOCK):
        total = splat(0.0, SUM_LANES)
        for i in range(start, start + SUM_BLOCK, SUM_LANES):
            total = total + convert(load_f32(x, i, SUM_LANES), f64)
        push(levels, fill, 0, sum_lanes(total))
    return finish(levels, fill)


@kernel
def _sum_squares(x, levels, fill):
    for start in range(0, x.size, SUM_BLOCK):
        total = splat(0.0, SUM_LANES)
        for i in range(start, start + SUM_BLOCK, SUM_LANES):
            values = convert(load_f32(x, i, SUM_LANES), f64)
            total = total + values * values
        push(levels, fill, 0, sum_lanes(total))
    return finish(levels, fill)


@kernel
def _sign_sums(x, low_levels, low_fill, high_levels, high_fill):
    num_low, zero = 0, splat(np.float32(0), SUM_LANES)
    for start in range(0, x.size, SUM_BLOCK):
        low, high = splat(0.0, SUM_LANES), splat(0.0, SUM_LANES)
        for i in range(start, start + SUM_BLOCK, SUM_LANES):
            values = load_f32(x, i, SUM_LANES)
            is_low = values < 0
            # The masks are written so that a NaN enters both sums.
            low = low + convert(select(values >= 0, zero, values), f64)
            high = high + convert(select(is_low, zero, values), f64)
            num_low += popcount(mask_bits(is_low))
        push(low_levels, low_fill, 0, sum_lanes(low))
        push(high_levels, high_fill, 0, sum_lanes(high))
    return finish(low_levels, low_fill), finish(high_levels, high_fill), num_low


def _new_levels() -> tuple[np.ndarray, np.ndarray]:
    return np.empty(LEVELS * SUM_BLOCK), np.zeros(LEVELS, np.int64)


def _rounded(value: float) -> np.float32:
    with np.errstate(all="ignore"):
        return np.float32(value)


def block_sum(x: np.ndarray) -> np.float64:
    return np.float64(_sum(as_input(x), *_new_levels()))


def mean(x: np.ndarray) -> np.float32:
    return _rounded(block_sum(x) / max(1, x.size))


def norm(x: np.ndarray) -> np.float32:
    return _rounded(np.sqrt(_sum_squares(as_input(x), *_new_levels())))


def sign_means(x: np.ndarray) -> tuple[np.float32, np.float32, int]:
    low, high, num_low = _sign_sums(as_input(x), *_new_levels(), *_new_levels())
    num_high = x.size - num_low
    return _rounded(low / max(1, num_low)), _rounded(high / max(1, num_high)), num_high
