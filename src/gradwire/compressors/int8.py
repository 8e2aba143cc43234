"""8-bit integers with a scale per block: q = x / scale in [-127, 127], with scale = largest magnitude / 127.

With stochastic rounding, the default, it is unbiased and needs no feedback. With rounding to nearest it is biased, and
a contraction with δ = 1 / (1 + (B - 1) / 254²). Elements vanish in a block whose largest magnitude is below 63.5
times the smallest float32. Payloads cannot be summed; see `int8shared`.

Body: ceil(N/B) scales as float32, then N integers.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 5.1, "8-bit int" (255 values, -128 unused); block scales and
stochastic rounding as in QSGD (Alistarh et al. 2017) with the maximum norm. Differences: scales are real numbers, not
powers of two.
"""
# Shapes: N = elements of the tensor or range, B = block

from __future__ import annotations

from typing import Any

from gradwire.compressors.base import FeedbackName
from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, floor, random, round_even, types

_LEVELS = 127


def _feedback(stochastic: bool, **_: Any) -> FeedbackName:
    return "none" if stochastic else "error"


def _contraction(size: int, block: int, stochastic: bool) -> float | None:
    """The largest element of a block is exact, the others lose at most half a step."""
    return None if stochastic else 1 / (1 + (block - 1) / (2 * _LEVELS) ** 2)


@compressor(feedback=_feedback, unbiased=lambda stochastic, **_: stochastic, contraction=_contraction)
def int8(g: Any, block: int = 1024, stochastic: bool = True) -> Any:
    """8-bit integers with a scale per block.

    Args:
        g: Gradient.
        block: Elements that share a scale.
        stochastic: If true, round at random and without bias; otherwise to nearest.
    """
    scale = abs(g).blocks(block).reduce(max) / _LEVELS
    q = floor(g / scale + random()) if stochastic else round_even(g / scale)
    return concat(scale=scale, q=q.map(dtype=types.int8))


@int8.decode
def _(p: Any) -> Any:
    return p.q * p.scale
