"""Selection by magnitude, and sparse pairs to dense and back. Contracts: `reference.select`.

`top_k` estimates the threshold of a long input from a sample. It then reads the input once, or twice in the rare case
that the estimate was too high. A short input, or one of which much is kept, is read three times: two histograms and a
selection.
"""
# Shapes: N elements, K kept elements, W ranks

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import LANES, MAGNITUDE, addresses, as_input, as_writable, load_f32
from gradwire.kernels.cpu.lanes import (
    bitcast,
    first_lane,
    lanes_below,
    mask_bits,
    popcount,
    trailing_zeros,
)
from gradwire.kernels.cpu.vector import array_at, f32, load, store, u32
from gradwire.kernels.layout import expect_same_ranks, expect_size

# Selections write this many pairs at a time, even where there are fewer: a branch for each pair, or for each vector
# that has one, would be mispredicted too often.
_SLOTS = 4
# Radix selection splits the 31 bits of a magnitude in two: 15 bits, then 16.
_UPPER_BINS, _LOWER_BINS = 1 << 15, 1 << 16
_LOWER_BITS = 16
# The sample consists of runs of neighbors at equally spaced places. It is used for inputs of at least the minimum
# length, shorter ones gain nothing, and up to the fraction kept at which candidates take little memory.
_SAMPLE_RUN, _SAMPLE_PLACES = 16, 4096
_SAMPLE_MIN_LENGTH, _SAMPLE_MAX_KEPT = 1 << 16, 1 / 16
# Elements of an output tile: 128 KB. With fewer pairs than one in `_FEW` elements the output is a single tile: it is
# cleared with stores that bypass the cache, and few of its lines are touched again.
_TILE, _FEW = 1 << 15, 64


@kernel
def _keys(x, i):
    """Magnitudes as integers in the same order; NaN is above infinity."""
    return bitcast(load_f32(x, i, LANES), u32) & MAGNITUDE


@kernel
def _chosen(keys, low, span, count):
    """Bits of those of the first `count` lanes whose key is in [low, low + span]."""
    return mask_bits((keys - low) <= span) & mask_bits(lanes_below(count, LANES))


@kernel
def _select(x, start, low, scratch, indices, values, count):
    """Append the pairs from element `start` on whose key is at least `low`.

    Returns:
        The number of pairs, and the element to continue from: the end of x, unless the buffers are nearly full.
    """
    span = np.uint32(MAGNITUDE) - low
    for i in range(start, x.size, LANES):
        floats = load_f32(x, i, LANES)
        chosen = _chosen(bitcast(floats, u32) & MAGNITUDE, low, span, x.size - i)
        store(scratch, 0, floats)
        num_chosen = popcount(chosen)
        if count + num_chosen + _SLOTS > indices.size:
            return count, i
        for first in range(count, count + max(num_chosen, 1), _SLOTS):
            for slot in range(first, first + _SLOTS):
                lane = trailing_zeros(chosen)
                indices[slot] = i + lane
                values[slot] = scratch[lane]
                chosen &= chosen - np.uint64(1)
        count += num_chosen
    return count, x.size


def _scratch(dtype: type) -> np.ndarray:
    """Memory for the lanes of a vector, and one more for the lane that an empty mask points to."""
    return np.zeros(LANES + 1, dtype)


@kernel
def _upper_histogram(x, scratch, bins):
    for i in range(0, x.size, LANES):
        store(scratch, 0, _keys(x, i) >> _LOWER_BITS)
        for j in range(min(LANES, x.size - i)):
            bins[scratch[j]] += 1


@kernel
def _lower_histogram(x, upper, scratch, bins):
    for i in range(0, x.size, LANES):
        keys = _keys(x, i)
        chosen = _chosen(keys >> _LOWER_BITS, upper, np.uint32(0), x.size - i)
        if chosen == 0:
            continue
        store(scratch, 0, keys & (_LOWER_BINS - 1))
        while chosen != 0:
            bins[scratch[trailing_zeros(chosen)]] += 1
            chosen &= chosen - np.uint64(1)


@kernel
def _find_bin(bins, k):
    """The bin that holds the k-th largest, and how many of its entries are among the k largest."""
    for b in range(bins.size - 1, -1, -1):
        if bins[b] >= k:
            return b, k
        k -= bins[b]
    return 0, k


def _kth_key(x: np.ndarray, k: int) -> tuple[np.uint32, int]:
    """The k-th largest key, and how many keys equal to it are among the k largest. Reads x twice."""
    scratch = _scratch(np.uint32)
    bins = np.zeros(_UPPER_BINS, np.int64)
    _upper_histogram(x, scratch, bins)
    upper, num_in_bin = _find_bin(bins, k)
    bins = np.zeros(_LOWER_BINS, np.int64)
    _lower_histogram(x, np.uint32(upper), scratch, bins)
    lower, num_ties = _find_bin(bins, num_in_bin)
    return np.uint32(upper << _LOWER_BITS | lower), num_ties


@kernel
def _select_keys(x, key, num_ties, scratch, indices):
    """Write the indices of all magnitudes above `key`, and of the first `num_ties` equal to it."""
    count = 0
    for i in range(0, x.size, LANES):
        keys = _keys(x, i)
        chosen = _chosen(keys, key, np.uint32(MAGNITUDE) - key, x.size - i)
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
            if count == indices.size:  # x has changed since its keys were counted
                return
            indices[count] = i + lane
            count += 1


def _top_k(x: np.ndarray, k: int, indices: np.ndarray) -> None:
    key, num_ties = _kth_key(x, k)
    _select_keys(x, key, num_ties, _scratch(np.uint32), indices)


def _sampled_key(x: np.ndarray, k: int) -> tuple[np.uint32, int]:
    """A key that k elements or somewhat more are likely to reach, and how many candidates to expect at most."""
    places = np.linspace(0, x.size - _SAMPLE_RUN, min(_SAMPLE_PLACES, x.size // 1024), dtype=np.int64)
    sample = x[(places[:, None] + np.arange(_SAMPLE_RUN)).reshape(-1)]
    expected = sample.size * k / x.size
    # Four standard deviations more, as if elements were independent. Neighbors are not, so it may still fail.
    rank = min(sample.size, int(expected + 4 * expected**0.5) + 4)
    return _kth_key(sample, rank)[0], int(1.5 * rank * x.size / sample.size)


def _top_k_of_candidates(x: np.ndarray, k: int, low: np.uint32, capacity: int, indices: np.ndarray) -> bool:
    """Select the k largest of the elements whose key is at least `low`; return False if there are fewer. Reads x once.

    When the candidates reach the capacity, only the k largest stay, and later candidates must exceed the smallest of
    them.
    """
    capacity = max(capacity, 2 * k) + LANES + _SLOTS
    places, values, scratch = np.empty(capacity, indices.dtype), np.empty(capacity, np.float32), _scratch(np.float32)
    count, at = 0, 0
    while at < x.size:
        count, at = _select(x, at, low, scratch, places, values, count)
        if count > k:
            chosen = np.empty(k, np.int64)
            _top_k(values[:count], k, chosen)
            places[:k], values[:k] = places[chosen], values[chosen]
            count, low = k, _least_key(values[:k]) + np.uint32(1)
    if count < k:
        return False
    indices[:] = places[:k]
    return True


def _least_key(values: np.ndarray) -> np.uint32:
    return np.uint32((values.view(np.uint32) & np.uint32(MAGNITUDE)).min())


def top_k(x: np.ndarray, k: int, indices: np.ndarray) -> None:
    if not 0 <= k <= x.size:
        raise ValueError(f"Expected k from 0 to {x.size}, got {k} (in top_k).")
    expect_size("top_k", "indices", indices, k)
    x = as_input(x)
    if k == 0:
        return
    if x.size < _SAMPLE_MIN_LENGTH or k > x.size * _SAMPLE_MAX_KEPT:
        _top_k(x, k, indices)
        return
    low, capacity = _sampled_key(x, k)
    if not _top_k_of_candidates(x, k, low, capacity, indices):
        _top_k_of_candidates(x, k, np.uint32(0), capacity, indices)


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


@kernel
def _add_below(index, values, first, end, out):
    """Add the pairs from number `first` on whose position is below `end`; return the number of the next pair."""
    j = first
    while j < index.size and index[j] < end:
        out[index[j]] += values[j] + np.float32(0)
        j += 1
    return j


@kernel
def scatter_lists(indices, values, counts, out):
    """`scatter_sum` for compiled callers: lists of uint32 and float32 by address. Negative zeros count as zero.

    Each tile of the output is cleared and added to while it is in the cache, so memory is written once for any number
    of ranks.
    """
    next_of = np.zeros(counts.size, np.int64)
    tile = max(1, out.size) if counts.sum() < out.size // _FEW else _TILE
    for start in range(0, out.size, tile):
        end = min(out.size, start + tile)
        out[start:end] = 0
        for rank in range(counts.size):
            index = array_at(indices[rank], counts[rank], u32)
            sent = array_at(values[rank], counts[rank], f32)
            next_of[rank] = _add_below(index, sent, next_of[rank], end, out)


def scatter_sum(indices: Sequence[np.ndarray], values: Sequence[np.ndarray], out: np.ndarray) -> None:
    expect_same_ranks("scatter_sum", indices, values)
    if all(each.dtype == np.uint32 for each in indices):
        for where, what in zip(indices, values):
            expect_size("scatter_sum", "values", what, where.size)
        counts = np.array([each.size for each in indices], np.int64)
        scatter_lists(addresses(indices, np.uint32), addresses(values, np.float32), counts, out)
        return
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
