"""Elementwise sweeps over a gradient: cast, compensate, accumulate.

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


def accumulate(x: np.ndarray, out: np.ndarray) -> None:
    """Add x to `out`, float32[N]."""
    expect_size("accumulate", "out", out, x.size)
    with np.errstate(all="ignore"):
        out += as_float32(x)


def mean(ranks: Sequence[np.ndarray], scale: float, out: np.ndarray) -> bool:
    """Write the sum of scale * x over the gradients of all ranks, in their order; return whether it is finite.

    Args:
        ranks: Gradients with the element type of `out`, in which float64 is calculated, too.
        scale: Multiplier, used as float32.
        out: Array of N elements; may be one of `ranks`.
    """
    for x in ranks:
        expect_size("mean", "x", x, out.size)
    factor = np.float32(scale)
    with np.errstate(all="ignore"):
        if out.dtype == np.float64:
            out[:] = sum((factor * x for x in ranks[1:]), start=factor * ranks[0])
            return bool(np.isfinite(out).all())
        from_float32(sum((factor * as_float32(x) for x in ranks[1:]), start=factor * as_float32(ranks[0])), out)
    return bool(np.isfinite(as_float32(out)).all())
