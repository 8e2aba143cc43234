"""Truncation of mantissa bits that hardly affect the parameter update.

Source: GCOMP (SoCC 2024), section 5. `gradwire.compressors.support.gcomp_metric` explains the numbers.
"""
# Shapes: N elements

from __future__ import annotations

import numpy as np

from gradwire.kernels.float_format import LEVELS, as_bits, format_of
from gradwire.kernels.layout import expect_size
from gradwire.kernels.reference.elements import as_float32

_INFINITY = np.float32(np.inf)


def update_limits(
    parameter: np.ndarray,
    first: np.ndarray | None,
    second: np.ndarray | None,
    numbers: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write the gradient that would change each parameter by its own magnitude: base / gain, at least 0.

    With D = sqrt(second · spread) + eps, or 1 without a second moment:

        base = |parameter| · max(0, keep − decay / D) − max(0, sign(parameter) · first · (pull + pull_over / D))
        gain = direct / D + through · |first| / D²

    A D that is infinite, which may be an overflow, or NaN yields 0.

    Args:
        parameter: Parameter, in the gradient's element type.
        first: First moment, or None for zeros.
        second: Second moment, or None.
        numbers: float32[8]: keep, decay, pull, pull_over, direct, through, spread, eps.
        out: float32[N].
    """
    keep, decay, pull, pull_over, direct, through, spread, eps = numbers
    for what, array in (("out", out), ("first", first), ("second", second)):
        if array is not None:
            expect_size("update_limits", what, array, parameter.size)
    theta = as_float32(parameter)
    m = np.zeros(theta.size, np.float32) if first is None else as_float32(first)
    with np.errstate(all="ignore"):
        D = np.ones(theta.size, np.float32) if second is None else np.sqrt(as_float32(second) * spread) + eps
        kept = _or_zero(keep - decay / D)
        pulled = _or_zero(np.copysign(np.float32(1), theta) * m * (pull + pull_over / D))
        base = _or_zero(np.abs(theta) * kept - pulled)
        out[:] = np.where(D < _INFINITY, base / (direct / D + through * np.abs(m) / (D * D)), np.float32(0))


def _or_zero(values: np.ndarray) -> np.ndarray:
    """Values above 0; 0 for all others, including NaN."""
    return np.where(values > 0, values, np.float32(0))


def truncate_floats(x: np.ndarray, limits: np.ndarray, guard: float, out: np.ndarray, levels: int = LEVELS - 1) -> None:
    """Write x with the last bits of each mantissa removed, by the highest level at which limit / |x| > guard · 2^bits.

    An element that becomes 0 by losing bits is +0. NaN, infinities and elements whose limit is NaN are unchanged.

    Args:
        x: float32, float16 or uint16 (bfloat16 bits).
        limits: float32[N], from `update_limits`.
        guard: Safety factor, used as float32.
        out: Same type as x; may be x.
        levels: Highest level to use, 0 to 3.
    """
    form = format_of("truncate_floats", x)
    expect_size("truncate_floats", "limits", limits, x.size)
    expect_size("truncate_floats", "out", out, x.size)
    bits = as_bits(x)
    least = np.float32(2.0**form.least_exponent)
    size = np.maximum(np.abs(as_float32(x)), least)
    level = np.zeros(x.size, np.int64)
    with np.errstate(all="ignore"):
        for each in range(1, levels + 1):
            level += size * np.float32(guard * 2.0 ** (each * form.step)) < limits
    cut = bits.astype(np.int64) >> (level * form.step) << (level * form.step)
    sign = 1 << (form.bits - 1)
    as_bits(out)[:] = np.where((level > 0) & (cut & (sign - 1) == 0), 0, cut).astype(bits.dtype)
