"""Selection by magnitude, and sparse pairs to dense and back. Mirrors `reference.select`, where the contracts stand."""
# Shapes: N elements, K kept elements, W ranks

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.kernels.cpu.elements import LANES, MAGNITUDE, as_input, as_writable, load_f32
from gradwire.kernels.cpu.lanes import (
    bitcast,
    first_lane,
    join,
    lanes_below,
    mask_bits,
    popcount,
    trailing_zeros,
)
from gradwire.kernels.cpu.vector import f32, i32, kernel, load, store, u32
from gradwire.kernels.layout import expect_same_ranks, expect_size

_STEP = 64
# Radix selection looks at the 31 bits of a magnitude in two parts: 15 bits, then 16.
_UPPER_BINS, _LOWER_BINS = 1 << 15, 1 << 16
_LOWER_BITS = 16


@kernel
def _magnitude(values):
    return bitcast(bitcast(values, i32) & MAGNITUDE, f32)


@kernel
def _count_above(x, threshold):
    count = 0
    for i in range(0, x.size, LANES):
        above = mask_bits(_magnitude(load_f32(x, i, LANES)) >= threshold)
        count += popcount(above & mask_bits(lanes_below(x.size - i, LANES)))
    return count


def count_above(x: np.ndarray, threshold: float) -> int:
    return int(_count_above(as_input(x), np.float32(threshold)))


@kernel
def _select_threshold(x, threshold, scratch, indices, values):
    count = 0
    for i in range(0, x.size, _STEP):
        a, b = load_f32(x, i, LANES), load_f32(x, i + 16, LANES)
        c, d = load_f32(x, i + 32, LANES), load_f32(x, i + 48, LANES)
        lower = join(_magnitude(a) >= threshold, _magnitude(b) >= threshold)
        upper = join(_magnitude(c) >= threshold, _magnitude(d) >= threshold)
        above = mask_bits(join(lower, upper))
        if x.size - i < _STEP:
            above &= mask_bits(lanes_below(x.size - i, _STEP))
        if above == 0:
            continue
        store(scratch, 0, join(join(a, b), join(c, d)))
        while above != 0:
            if count == indices.size:
                return count
            lane = trailing_zeros(above)
            indices[count] = i + lane
            values[count] = scratch[lane]
            count += 1
            above &= above - np.uint64(1)
    return count


def select_threshold(x: np.ndarray, threshold: float, indices: np.ndarray, values: np.ndarray) -> int:
    expect_size("select_threshold", "values", values, indices.size)
    scratch = np.empty(_STEP, np.float32)
    return int(_select_threshold(as_input(x), np.float32(threshold), scratch, indices, values))


@kernel
def _upper_histogram(x, scratch, bins):
    for i in range(0, x.size, _STEP):
        for j in range(0, _STEP, LANES):
            keys = (bitcast(load_f32(x, i + j, LANES), u32) & MAGNITUDE) >> _LOWER_BITS
            store(scratch, j, keys)
        for j in range(min(_STEP, x.size - i)):
            bins[scratch[j]] += 1


@kernel
def _lower_histogram(x, upper, scratch, bins):
    for i in range(0, x.size, LANES):
        keys = bitcast(load_f32(x, i, LANES), u32) & MAGNITUDE
        inside = mask_bits(lanes_below(x.size - i, LANES))
        chosen = np.uint64(mask_bits((keys >> _LOWER_BITS) == upper) & inside)
        if chosen == 0:
            continue
        store(scratch, 0, keys & (_LOWER_BINS - 1))
        while chosen != 0:
            bins[scratch[trailing_zeros(chosen)]] += 1
            chosen &= chosen - np.uint64(1)


@kernel
def _find_bin(bins, k):
    """The bin that holds the k-th largest, and how many of it are among the k largest."""
    for b in range(bins.size - 1, -1, -1):
        if bins[b] >= k:
            return b, k
        k -= bins[b]
    return 0, k


@kernel
def _select_keys(x, key, num_ties, scratch, indices):
    """Indices of all magnitudes above `key`, and of the first `num_ties` that are equal to it."""
    count = 0
    for i in range(0, x.size, LANES):
        keys = bitcast(load_f32(x, i, LANES), u32) & MAGNITUDE
        inside = mask_bits(lanes_below(x.size - i, LANES))
        chosen = np.uint64(mask_bits(keys >= key) & inside)
        if chosen == 0:
            continue
        store(scratch, 0, keys)
        while chosen != 0:
            lane = trailing_zeros(chosen)
            chosen &= chosen - np.uint64(1)
            if scratch[lane] == key:
                if num_ties == 0:
                    continue
                num_ties -= 1
            indices[count] = i + lane
            count += 1


def top_k(x: np.ndarray, k: int, indices: np.ndarray) -> None:
    if not 0 <= k <= x.size:
        raise ValueError(f"Expected k from 0 to {x.size}, got {k} (in top_k).")
    expect_size("top_k", "indices", indices, k)
    if k == 0:
        return
    x, scratch = as_input(x), np.empty(_STEP, np.uint32)
    bins = np.zeros(_UPPER_BINS, np.int64)
    _upper_histogram(x, scratch, bins)
    upper, num_in_bin = _find_bin(bins, k)
    bins = np.zeros(_LOWER_BINS, np.int64)
    _lower_histogram(x, upper, scratch, bins)
    lower, num_ties = _find_bin(bins, num_in_bin)
    _select_keys(x, (upper << _LOWER_BITS) | lower, num_ties, scratch, indices)


@kernel
def _take(x, indices, values):
    for i in range(indices.size):
        values[i] = first_lane(load_f32(x, indices[i], 1))


@kernel
def _clear(indices, out):
    for i in range(indices.size):
        out[indices[i]] = 0


def take(x: np.ndarray, indices: np.ndarray, values: np.ndarray, residual: np.ndarray | None = None) -> None:
    expect_size("take", "values", values, indices.size)
    indices = as_writable(indices)
    _take(as_input(x), indices, values)
    if residual is not None:
        expect_size("take", "residual", residual, x.size)
        _clear(indices, residual)


@kernel
def _scatter(indices, values, out, accumulate):
    for i in range(indices.size):
        if accumulate:
            out[indices[i]] += values[i]
        else:
            out[indices[i]] = values[i]


def scatter(indices: np.ndarray, values: np.ndarray, out: np.ndarray, accumulate: bool = False) -> None:
    expect_size("scatter", "values", values, indices.size)
    _scatter(as_writable(indices), as_writable(values), out, accumulate)


def scatter_sum(indices: Sequence[np.ndarray], values: Sequence[np.ndarray], out: np.ndarray) -> None:
    expect_same_ranks("scatter_sum", indices, values)
    out[:] = 0
    for where, what in zip(indices, values):
        scatter(where, what, out, accumulate=True)


@kernel
def _is_ascending(indices):
    for i in range(0, indices.size - 1, LANES):
        descends = mask_bits(load(indices, i + 1, LANES) <= load(indices, i, LANES))
        if descends & mask_bits(lanes_below(indices.size - 1 - i, LANES)):
            return False
    return True


def check_indices(indices: np.ndarray, n: int) -> bool:
    if indices.size == 0:
        return True
    return bool(_is_ascending(as_writable(indices))) and int(indices[0]) >= 0 and int(indices[-1]) < n
