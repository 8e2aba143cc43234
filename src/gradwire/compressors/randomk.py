"""Random sparsification: each element is kept with probability p, and then divided by p.

Unbiased, with a variance of (1/p - 1) ‖g‖², so it needs no error feedback. With `scaled=False` kept elements are not
divided: biased, on average a contraction with δ = p, with error feedback (sparsified SGD with memory).

Body: number of elements, the elements as float32 before the division, positions in few bits. The decoder divides.

Source: Stich et al. 2018, section 2; Wangni et al. 2018, with equal probabilities. Differences: elements are chosen
independently, so their number varies. p is the multiple of 2⁻¹⁶ nearest to `ratio`, because random numbers have 16
bits. So that payloads have a bound, elements after the first 2pN + 64 are dropped, which happens with a probability
below e⁻⁷⁰.
"""
# Shapes: N = elements of the tensor or range

from __future__ import annotations

import math
from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.lang import ceil, concat, random


def probability(ratio: float) -> float:
    """Probability p of an element to be kept, a multiple of 2⁻¹⁶."""
    return max(1, math.ceil(ratio * 65536 - 0.5)) / 65536


@compressor(
    feedback=lambda scaled, **_: "none" if scaled else "error",
    unbiased=lambda scaled, **_: scaled,
    variance=lambda size, ratio, **_: 1 / probability(ratio) - 1,
)
def randomk(g: Any, ratio: float = 0.01, scaled: bool = True) -> Any:
    """A random part of the elements, scaled so that the expected value is the gradient.

    Args:
        g: Gradient.
        ratio: Probability of an element to be kept, rounded to a multiple of 2^-16.
        scaled: If true, divide kept elements by that probability; otherwise the others stay in the residual.
    """
    p = probability(ratio)
    kept = g.filter(lambda _: random() < p, at_most=ceil(2 * p * g.size) + 64)
    return concat(index=kept.index, value=kept.value)


@randomk.decode
def _(p: Any, ratio: float, scaled: bool) -> Any:
    return (p.value * (1 / probability(ratio)) if scaled else p.value).scatter(p.index)
