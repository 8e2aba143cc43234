"""Statistics of a chunk of floats, for `floats`: mean exponent, symbols, number of elements of each level."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import LANES
from gradwire.kernels.cpu.fields import fields_bytes
from gradwire.kernels.cpu.lanes import (
    convert,
    convert_like,
    largest_lane,
    mask_bits,
    maximum,
    minimum,
    popcount,
    select,
    splat,
    sum_integers,
)
from gradwire.kernels.cpu.vector import load, store, u16, u32
from gradwire.kernels.float_format import FLAT, LEVELLED, LEVELS


@kernel
def mean_of(x, form):
    """Rounded mean of the exponents above 0, or 1 if there is none."""
    return mean_and_largest(x, form)[0]


@kernel
def mean_and_largest(x, form):
    """Rounded mean of the exponents above 0, or 1 if there is none; and the largest exponent."""
    _, mantissa, exponents, _, _, _ = form
    none = convert_like(splat(np.uint32(0), LANES), x)
    sums, counts, most = none, none, none  # a lane of 16 bits holds the sum of CHUNK / LANES exponents
    for i in range(0, x.size, LANES):
        found = (load(x, i, LANES) >> mantissa) & (exponents - 1)
        sums, counts, most = sums + found, counts + minimum(found, none + 1), maximum(most, found)
    total, count = np.int64(sum_integers(convert(sums, u32))), np.int64(sum_integers(convert(counts, u32)))
    return (total + count // 2) // count if count > 0 else np.int64(1), np.int64(largest_lane(most))


@kernel
def turn_of(form, mean):
    """Compiled `FloatFormat.turn`."""
    return (form[5] - mean + form[2] - 1) % (form[2] - 1)


@kernel
def symbols_of(x, form, mean, symbols, counts):
    """Write the symbols, uint16. Count +0 in counts[4], and all other elements by level."""
    _, mantissa, exponents, special, step, _ = form
    turn = turn_of(form, mean)
    counts[:] = 0
    for i in range(0, x.size, LANES):
        values = convert(load(x, i, LANES), u32)
        found = (values >> mantissa) & (exponents - 1)
        moved = found + turn
        moved = select(moved >= exponents, moved - (exponents - 1), moved)
        rest = select(values != 0, splat(np.uint32(special), LANES), found)
        store(symbols, i, convert(select(found != 0, moved, rest), u16))
        counts[LEVELS] += popcount(mask_bits(values == 0))
        for level in range(1, LEVELS):
            counts[level] += popcount(mask_bits((values & ((1 << (level * step)) - 1)) == 0))
    missing = (LANES - x.size % LANES) % LANES  # lanes past the end are zeros
    for level in range(1, LEVELS + 1):
        counts[level] -= missing
    _by_level(x.size, counts)


@kernel
def _by_level(size, counts):
    """Turn counts of elements of at least each level, with +0, into counts of each level, without +0."""
    zeros = counts[LEVELS]
    counts[0] = size
    for level in range(LEVELS - 1):
        counts[level] -= counts[level + 1]
    counts[LEVELS - 1] -= zeros


@kernel
def mantissa_bytes(form, counts):
    """The shorter form of signs and mantissas, and its bytes."""
    _, mantissa, _, _, step, _ = form
    kept = 0
    levelled = 0
    for level in range(LEVELS):
        kept += counts[level]
        levelled += fields_bytes(counts[level], 1 + mantissa - level * step)
    levelled += fields_bytes(kept, 2)
    flat = fields_bytes(kept, 1 + mantissa)
    return (FLAT, flat) if flat <= levelled else (LEVELLED, levelled)


@kernel
def count_levels(values, step, counts):
    """Count signs and mantissas by level."""
    counts[:] = 0
    for i in range(0, values.size, LANES):
        found = load(values, i, LANES)
        for level in range(1, LEVELS):
            counts[level] += popcount(mask_bits((found & ((1 << (level * step)) - 1)) == 0))
    missing = (LANES - values.size % LANES) % LANES
    for level in range(1, LEVELS):
        counts[level] -= missing
    _by_level(values.size, counts)
