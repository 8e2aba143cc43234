"""3-value quantization and quartic encoding. Contracts: `reference.ternary`.

64 bytes are packed at a time. Each starts at 121, five digits of value 0. A digit of 1 or -1 adds or subtracts its
power of 3, masked by a comparison.
"""
# Shapes: N elements, W ranks, S = ceil(N/5) bytes; digit k of byte i is element k * S + i

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import LANES, addresses, as_input, as_writable, load_f32
from gradwire.kernels.cpu.lanes import convert, largest_lane, maximum, select, splat
from gradwire.kernels.cpu.vector import array_at, load, store, store_until, u8, u32
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
# byte * 256 / 243 as an 8-bit fraction, rounded up: tripling it carries the first digit out, and leaves the fraction
# of the others. The digit is above 0 or 1 where the fraction is at least one or two thirds. Exact for all 243 bytes.
_FRACTION, _FRACTION_UP, _FRACTION_SHIFT = 8631, 8100, 13
_THIRD, _TWO_THIRDS = 86, 171


@kernel
def _packed(packed, power, high, low):
    """Bytes with the digit of this power added."""
    raised = select(high, packed + power, packed)
    return select(low, raised - power, raised)


@kernel
def pack_digits(x, half, out):
    """`pack_ternary` without a residual. `half` is the threshold."""
    size = out.size
    for i in range(0, size, LANES):
        packed, power = splat(np.uint8(ZERO_BYTE), LANES), 81
        for k in range(TERNARY_DIGITS):
            values = load_f32(x, k * size + i, LANES)
            packed = _packed(packed, power, values > half, values < -half)
            power //= 3
        store(out, i, packed)


@kernel
def pack_digits_residual(x, half, M, out, residual):
    """`pack_ternary` with a residual."""
    size = out.size
    for i in range(0, size, LANES):
        packed, power = splat(np.uint8(ZERO_BYTE), LANES), 81
        for k in range(TERNARY_DIGITS):
            values = load_f32(x, k * size + i, LANES)
            high, low = values > half, values < -half
            left = select(low, values + M, select(high, values - M, values))
            # Not past this digit's part: x may be the residual, and the start of the next part is already done.
            store_until(residual, k * size + i, (k + 1) * size, left)
            packed = _packed(packed, power, high, low)
            power //= 3
        store(out, i, packed)


def pack_ternary(x: np.ndarray, M: float, out: np.ndarray, residual: np.ndarray | None = None) -> None:
    expect_size("pack_ternary", "out", out, ceil_div(x.size, TERNARY_DIGITS))
    scale = np.float32(M)
    # No value exceeds infinity, so all digits are 0.
    half = half_of(float(scale)) if scale > 0 else np.float32(np.inf)
    if residual is None:
        pack_digits(as_input(x), half, out)
    else:
        expect_size("pack_ternary", "residual", residual, x.size)
        pack_digits_residual(as_input(x), half, scale, out, residual)


@kernel
def _fraction(bytes_):
    return convert((convert(bytes_, u32) * _FRACTION + _FRACTION_UP) >> _FRACTION_SHIFT, u8)


@kernel
def _digit(fraction, M):
    """The value of the first digit of a fraction."""
    zero, high, low = splat(np.float32(0), LANES), splat(M, LANES), splat(-M, LANES)
    return select(fraction >= _TWO_THIRDS, high, select(fraction >= _THIRD, zero, low))


@kernel
def _unpack(packed, M, out, accumulate):
    size = packed.size
    largest = splat(np.uint8(0), LANES)
    for i in range(0, size, LANES):
        bytes_ = load(packed, i, LANES)
        largest = maximum(largest, bytes_)
        fraction = _fraction(bytes_)
        for k in range(TERNARY_DIGITS):
            value = _digit(fraction, M)
            if accumulate:
                value = load(out, k * size + i, LANES) + value
            store_until(out, k * size + i, (k + 1) * size, value)
            fraction = fraction * 3
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
def sum_digits(packed, M, size, out):
    """`unpack_ternary_sum` without the check of the padding. `packed` holds addresses, `size` is S."""
    largest = splat(np.uint8(0), LANES)
    for i in range(0, size, LANES):
        a = b = c = d = e = splat(np.float32(0), LANES)
        for rank in range(packed.size):
            bytes_ = load(array_at(packed[rank], size, u8), i, LANES)
            largest = maximum(largest, bytes_)
            fraction, scale = _fraction(bytes_), M[rank]
            a = a + _digit(fraction, scale)
            b = b + _digit(fraction * 3, scale)
            c = c + _digit(fraction * 9, scale)
            d = d + _digit(fraction * 27, scale)
            e = e + _digit(fraction * 81, scale)
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
    valid = sum_digits(addresses(packed, np.uint8), as_writable(M), size, out)
    return bool(valid) and all(_padding_is_zero(digits, out.size) for digits in packed)
