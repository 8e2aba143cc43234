"""Truncation of mantissas. Contracts: `reference.truncate`."""
# Shapes: N elements

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import LANES, MAGNITUDE, as_input, as_writable, load_f32
from gradwire.kernels.cpu.lanes import bitcast, convert, convert_like, maximum, select, splat, sqrt
from gradwire.kernels.cpu.vector import f32, i32, load, store, u32
from gradwire.kernels.float_format import LEVELS, as_bits, format_of
from gradwire.kernels.layout import expect_size

_INFINITY = np.float32(np.inf)
_SIGN = np.int32(-(1 << 31))


@kernel
def _magnitude(values):
    return bitcast(bitcast(values, i32) & MAGNITUDE, f32)


@kernel
def _signed_like(values, signs):
    """Values, negated where `signs` is negative."""
    return bitcast(bitcast(values, i32) ^ (bitcast(signs, i32) & _SIGN), f32)


@kernel
def _limits(parameter, first, second, numbers, out):
    keep, decay, pull, pull_over, direct, through, spread, eps = numbers
    zeros, ones = splat(np.float32(0), LANES), splat(np.float32(1), LANES)
    for i in range(0, parameter.size, LANES):
        theta = load_f32(parameter, i, LANES)
        m, D = zeros, ones
        if first.size > 0:
            m = load_f32(first, i, LANES)
        if second.size > 0:
            D = sqrt(load_f32(second, i, LANES) * spread) + eps
        kept = maximum(splat(keep, LANES) - splat(decay, LANES) / D, zeros)
        pulled = maximum(_signed_like(m, theta) * (splat(pull_over, LANES) / D + pull), zeros)
        base = maximum(_magnitude(theta) * kept - pulled, zeros)
        found = base / (splat(direct, LANES) / D + _magnitude(m) * through / (D * D))
        store(out, i, select(D < _INFINITY, found, zeros))


def update_limits(
    parameter: np.ndarray,
    first: np.ndarray | None,
    second: np.ndarray | None,
    numbers: np.ndarray,
    out: np.ndarray,
) -> None:
    arrays = []
    for what, array in (("out", out), ("first", first), ("second", second)):
        if array is not None:
            expect_size("update_limits", what, array, parameter.size)
        arrays.append(as_input(parameter[:0] if array is None else array))  # moments have the type of the parameter
    _limits(as_input(parameter), arrays[1], arrays[2], tuple(np.float32(number) for number in numbers), out)


@kernel
def _truncate(x, bits, limits, factors, step, least, out):
    one, two, three = factors
    zeros = splat(np.uint32(0), LANES)
    magnitude = (1 << (8 * bits.itemsize - 1)) - 1
    for i in range(0, x.size, LANES):
        size = maximum(splat(least, LANES), _magnitude(load_f32(x, i, LANES)))  # in this order NaN is kept
        limit = load(limits, i, LANES)
        found = convert(load(bits, i, LANES), u32)
        cut = select(size * one < limit, (found >> step) << step, found)
        cut = select(size * two < limit, (found >> (2 * step)) << (2 * step), cut)
        cut = select(size * three < limit, (found >> (3 * step)) << (3 * step), cut)
        gone = (size * one < limit) & ((cut & magnitude) == 0)
        store(out, i, convert_like(select(gone, zeros, cut), out))


def truncate_floats(x: np.ndarray, limits: np.ndarray, guard: float, out: np.ndarray, levels: int = LEVELS - 1) -> None:
    form = format_of("truncate_floats", x)
    expect_size("truncate_floats", "limits", limits, x.size)
    expect_size("truncate_floats", "out", out, x.size)
    factors = tuple(
        np.float32(guard * 2.0 ** (level * form.step) if level <= levels else np.inf) for level in range(1, LEVELS)
    )
    least = np.float32(2.0**form.least_exponent)
    bits = as_writable(as_bits(x))
    _truncate(as_input(x), bits, as_writable(limits), factors, form.step, least, as_bits(out))
