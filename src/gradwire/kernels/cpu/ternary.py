"""3-value quantisation and quartic encoding. Mirrors `reference.ternary`, where the contracts stand.

The masks of 64 comparisons add to or subtract from 64 bytes at a time: 121 is five digits of value 0, and
digit k being 1 or -1 adds or subtracts its power of 3.
"""
# Shapes: N elements, W ranks, S = ceil(N/5) bytes; digit k of byte i is element k * S + i

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.kernels.cpu.elements import LANES, addresses, as_input, as_writable, load_f32
from gradwire.kernels.cpu.lanes import convert, join, maximum, select, splat
from gradwire.kernels.cpu.reduce import largest_lane
from gradwire.kernels.cpu.vector import array_at, kernel, load, store, store_until, u8, u32
from gradwire.kernels.layout import (
    NUM_QUARTIC,
    TERNARY_DIGITS,
    ZERO_BYTE,
    ceil_div,
    expect_same_ranks,
    expect_size,
    half_of,
)

_POWERS = (81, 27, 9, 3, 1)
_STEP = 64
# byte / 243 as a fraction of 24 bits, rounded up: multiplied by 3 it carries the first digit into bit 24.
_FRACTION_BITS = 24
_FRACTION = (1 << _FRACTION_BITS) // NUM_QUARTIC + 1
_FRACTION_MASK = (1 << _FRACTION_BITS) - 1


@kernel
def _step(packed, power, high, low):
    raised = select(high, packed + power, packed)
    return select(low, raised - power, raised)


@kernel
def _pack(x, half, out):
    size = out.size
    for i in range(0, size, _STEP):
        packed = splat(np.uint8(ZERO_BYTE), _STEP)
        power = 81
        for k in range(TERNARY_DIGITS):
            at = k * size + i
            a, b = load_f32(x, at, LANES), load_f32(x, at + 16, LANES)
            c, d = load_f32(x, at + 32, LANES), load_f32(x, at + 48, LANES)
            high = join(join(a > half, b > half), join(c > half, d > half))
            low = join(join(a < -half, b < -half), join(c < -half, d < -half))
            packed = _step(packed, power, high, low)
            power //= 3
        store(out, i, packed)


@kernel
def _remainder(values, half, M):
    """Masks of what becomes 1 and -1, and what is left of the values."""
    high, low = values > half, values < -half
    left = select(high, values - M, values)
    return high, low, select(low, values + M, left)


@kernel
def _pack_residual(x, half, M, out, residual):
    size = out.size
    for i in range(0, size, _STEP):
        packed = splat(np.uint8(ZERO_BYTE), _STEP)
        power = 81
        for k in range(TERNARY_DIGITS):
            at, end = k * size + i, (k + 1) * size
            high_a, low_a, a = _remainder(load_f32(x, at, LANES), half, M)
            high_b, low_b, b = _remainder(load_f32(x, at + 16, LANES), half, M)
            high_c, low_c, c = _remainder(load_f32(x, at + 32, LANES), half, M)
            high_d, low_d, d = _remainder(load_f32(x, at + 48, LANES), half, M)
            # Not past the digit's partition: x may be the residual, and the next one's start is done already.
            store_until(residual, at, end, join(join(a, b), join(c, d)))
            high = join(join(high_a, high_b), join(high_c, high_d))
            low = join(join(low_a, low_b), join(low_c, low_d))
            packed = _step(packed, power, high, low)
            power //= 3
        store(out, i, packed)


def pack_ternary(x: np.ndarray, M: float, out: np.ndarray, residual: np.ndarray | None = None) -> None:
    expect_size("pack_ternary", "out", out, ceil_div(x.size, TERNARY_DIGITS))
    scale = np.float32(M)
    # Nothing is above infinity: all digits are 0.
    half = half_of(float(scale)) if scale > 0 else np.float32(np.inf)
    if residual is None:
        _pack(as_input(x), half, out)
    else:
        expect_size("pack_ternary", "residual", residual, x.size)
        _pack_residual(as_input(x), half, scale, out, residual)


@kernel
def _digit(fraction, M):
    """The value of the first digit of a fraction, and the fraction that is left."""
    tripled = fraction * 3
    digit = tripled >> _FRACTION_BITS
    high, low = splat(M, LANES), splat(-M, LANES)
    value = select(digit == 2, high, select(digit == 0, low, splat(np.float32(0), LANES)))
    return value, tripled & _FRACTION_MASK


@kernel
def _unpack(packed, M, out, accumulate):
    size = packed.size
    largest = splat(np.uint32(0), LANES)
    for i in range(0, size, LANES):
        bytes_ = convert(load(packed, i, LANES), u32)
        largest = maximum(largest, bytes_)
        fraction = bytes_ * _FRACTION
        for k in range(TERNARY_DIGITS):
            at, end = k * size + i, (k + 1) * size
            value, fraction = _digit(fraction, M)
            if accumulate:
                value = value + load(out, at, LANES)
            store_until(out, at, end, value)
    return largest_lane(largest) < NUM_QUARTIC


def _padding_is_zero(packed: np.ndarray, size: int) -> bool:
    """Whether the digits past the last element (at most four) are of value 0."""
    places = (divmod(element, packed.size) for element in range(size, TERNARY_DIGITS * packed.size))
    return all(int(packed[i]) // _POWERS[k] % 3 == 1 for k, i in places)


def unpack_ternary(packed: np.ndarray, M: float, out: np.ndarray, accumulate: bool = False) -> bool:
    expect_size("unpack_ternary", "packed", packed, ceil_div(out.size, TERNARY_DIGITS))
    valid = _unpack(as_writable(packed), np.float32(M), out, accumulate)
    return bool(valid) and _padding_is_zero(packed, out.size)


@kernel
def _unpack_sum(packed, M, size, out):
    largest = splat(np.uint32(0), LANES)
    for i in range(0, size, LANES):
        a = b = c = d = e = splat(np.float32(0), LANES)
        for rank in range(packed.size):
            bytes_ = convert(load(array_at(packed[rank], size, u8), i, LANES), u32)
            largest = maximum(largest, bytes_)
            value, fraction = _digit(bytes_ * _FRACTION, M[rank])
            a = a + value
            value, fraction = _digit(fraction, M[rank])
            b = b + value
            value, fraction = _digit(fraction, M[rank])
            c = c + value
            value, fraction = _digit(fraction, M[rank])
            d = d + value
            value, fraction = _digit(fraction, M[rank])
            e = e + value
        store_until(out, i, size, a)
        store_until(out, size + i, 2 * size, b)
        store_until(out, 2 * size + i, 3 * size, c)
        store_until(out, 3 * size + i, 4 * size, d)
        store_until(out, 4 * size + i, 5 * size, e)
    return largest_lane(largest) < NUM_QUARTIC


def unpack_ternary_sum(packed: Sequence[np.ndarray], M: np.ndarray, out: np.ndarray) -> bool:
    expect_same_ranks("unpack_ternary_sum", packed, M)
    size = ceil_div(out.size, TERNARY_DIGITS)
    for digits in packed:
        expect_size("unpack_ternary_sum", "packed", digits, size)
    valid = _unpack_sum(addresses(packed, np.uint8), as_writable(M), size, out)
    return bool(valid) and all(_padding_is_zero(digits, out.size) for digits in packed)
