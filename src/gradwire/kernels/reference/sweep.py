"""Elementwise sweeps over a gradient: cast, compensate, advance a velocity, accumulate.

Source: error feedback as in Karimireddy et al. 2019, algorithm 2, step p = scale * g + e.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.kernels.layout import expect_size
from gradwire.kernels.reference.elements import as_float32, from_float32
from gradwire.kernels.reference.reduce import abs_max


def cast(x: np.ndarray, out: np.ndarray, scale: float = 1.0) -> None:
    """Write scale * x, rounded to nearest even in the element type of `out`.

    With equal types and a scale of 1, bits are copied unchanged.
    """
    expect_size("cast", "out", out, x.size)
    factor = np.float32(scale)
    if x.dtype == out.dtype and factor == 1:
        out[:] = x
        return
    values = as_float32(x)
    with np.errstate(all="ignore"):
        from_float32(values if factor == 1 else factor * values, out)


def compensate(x: np.ndarray, scale: float, residual: np.ndarray | None, out: np.ndarray) -> np.float32:
    """Write scale * x + residual to `out`; return its largest magnitude, or NaN if an element is not finite.

    Args:
        x: Gradient.
        scale: Multiplier, used as float32.
        residual: float32[N], or None for zeros. May be the same array as `out`.
        out: float32[N].
    """
    expect_size("compensate", "out", out, x.size)
    with np.errstate(all="ignore"):
        values = np.float32(scale) * as_float32(x)
        if residual is not None:
            expect_size("compensate", "residual", residual, x.size)
            values = values + residual
    out[:] = values
    return abs_max(out)


def advance_velocity(x: np.ndarray, scale: float, velocity: np.ndarray, momentum: float, out: np.ndarray) -> None:
    """Write momentum * velocity + scale * x to `out`.

    Args:
        x: Gradient.
        scale: Multiplier of the gradient, used as float32.
        velocity: float32[N]. May be the same array as `out`.
        momentum: Multiplier of the velocity, used as float32.
        out: float32[N].
    """
    expect_size("advance_velocity", "velocity", velocity, x.size)
    expect_size("advance_velocity", "out", out, x.size)
    with np.errstate(all="ignore"):
        out[:] = np.float32(momentum) * velocity + np.float32(scale) * as_float32(x)


def accumulate(x: np.ndarray, out: np.ndarray) -> None:
    """Add x to `out`, float32[N]."""
    expect_size("accumulate", "out", out, x.size)
    with np.errstate(all="ignore"):
        out += as_float32(x)


def weighted_sum(arrays: Sequence[np.ndarray], scales: Sequence[float], out: np.ndarray) -> bool:
    """Write the sum of scale * x, in the order of the arrays; return whether it is finite.

    Args:
        arrays: At least one gradient, with the element type of `out`; float64 is calculated in float64.
        scales: Multiplier of each, used as float32 or, for float64, as it is.
        out: Array of N elements; may be one of `arrays`.
    """
    for x in arrays:
        expect_size("weighted_sum", "x", x, out.size)
    wide = out.dtype == np.float64
    kind = np.float64 if wide else np.float32
    with np.errstate(all="ignore"):
        terms = [kind(scale) * (x if wide else as_float32(x)) for x, scale in zip(arrays, scales, strict=True)]
        total = sum(terms[1:], start=terms[0])
        if wide:
            out[:] = total
        else:
            from_float32(total, out)
    return bool(np.isfinite(out if wide else as_float32(out)).all())
