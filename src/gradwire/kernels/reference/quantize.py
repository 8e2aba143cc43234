"""8-bit quantization with a scale per block, its decoders, and integer accumulators for payloads.

q = x / scale in [-127, 127], rounded stochastically (unbiased) or to nearest even. Stochastic rounding adds
(u + 1/2) / 65536, with 16 random bits u, and takes the floor. A scale that is zero, not finite, or so small that
1 / scale overflows quantizes its block to 0. A NaN element becomes -127 and stays in the residual; callers check the
scales first.
"""
# Shapes: N elements, B elements per block, W ranks; scales are float32[ceil(N/B)]

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.kernels.layout import INT8_MAX, ceil_div, expect_same_ranks, expect_size
from gradwire.kernels.reference.elements import as_float32
from gradwire.kernels.reference.random import random16


def _inverse(scales: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / scales
    return np.where((scales > 0) & (inverse > 0) & (inverse < np.inf), inverse, np.float32(0))


def _spread(scales: np.ndarray, block: int, size: int) -> np.ndarray:
    return np.repeat(scales, block)[:size]


def quantize_int8(
    x: np.ndarray,
    scales: np.ndarray,
    block: int,
    key: int,
    first: int,
    out: np.ndarray,
    stochastic: bool,
    residual: np.ndarray | None = None,
) -> None:
    """Quantize x to int8.

    Args:
        x: Gradient.
        scales: Step of each block, float32[ceil(N/B)]: its largest magnitude divided by 127.
        block: B, at least 1.
        key: 64-bit key of the random stream, for stochastic rounding.
        first: Global element index of x[0] in the stream.
        out: int8[N].
        stochastic: Whether to round up with a probability equal to the fraction, instead of to nearest even.
        residual: float32[N], receives x - q * scale. May be the same array as x, or None.
    """
    expect_size("quantize_int8", "scales", scales, ceil_div(x.size, block))
    expect_size("quantize_int8", "out", out, x.size)
    values = as_float32(x)
    with np.errstate(all="ignore"):
        y = values * _spread(_inverse(scales), block, x.size)
        if stochastic:
            u = np.empty(x.size, np.uint16)
            random16(key, first, u)
            y = np.floor(y + (u.astype(np.float32) + np.float32(0.5)) * np.float32(2**-16))
        else:
            y = np.rint(y)
        y = np.where(y > -INT8_MAX, y, np.float32(-INT8_MAX))  # NaN becomes -127
        y = np.where(y < INT8_MAX, y, np.float32(INT8_MAX))
        out[:] = y.astype(np.int8)
        if residual is not None:
            expect_size("quantize_int8", "residual", residual, x.size)
            residual[:] = values - out.astype(np.float32) * _spread(scales, block, x.size)


def dequantize_int8(q: np.ndarray, scales: np.ndarray, block: int, out: np.ndarray, accumulate: bool = False) -> None:
    """Write (or add) q * scale to `out`, float32[N]."""
    expect_size("dequantize_int8", "q", q, out.size)
    expect_size("dequantize_int8", "scales", scales, ceil_div(out.size, block))
    with np.errstate(all="ignore"):
        values = q.astype(np.float32) * _spread(scales, block, out.size)
        out[:] = out + values if accumulate else values


def dequantize_int8_sum(q: Sequence[np.ndarray], scales: Sequence[np.ndarray], block: int, out: np.ndarray) -> None:
    """Write the sum over ranks of q * scale, added from 0.0 in rank order."""
    expect_same_ranks("dequantize_int8_sum", q, scales)
    out[:] = 0
    for levels, steps in zip(q, scales, strict=True):
        dequantize_int8(levels, steps, block, out, accumulate=True)


def add_int8(x: np.ndarray, out: np.ndarray) -> None:
    """Add the integers x (int8, int16 or int32) to the accumulator `out` (int16 or int32, at least as wide).

    The caller chooses an accumulator wide enough for the world size; a narrower one wraps.
    """
    expect_size("add_int8", "out", out, x.size)
    out += x


def finalize_int8(accumulator: np.ndarray, scales: np.ndarray, block: int, factor: float, out: np.ndarray) -> None:
    """Write accumulator * (scale * factor) to `out`, float32[N]. Both products are rounded to float32."""
    expect_size("finalize_int8", "accumulator", accumulator, out.size)
    expect_size("finalize_int8", "scales", scales, ceil_div(out.size, block))
    with np.errstate(all="ignore"):
        steps = scales * np.float32(factor)
        out[:] = accumulator.astype(np.float32) * _spread(steps, block, out.size)
