"""Random sparsification: each element is kept with probability p, and then divided by it.

Unbiased, with a variance of (1/p - 1) ‖g‖², so that it needs no error feedback. Payloads cannot be summed. Body: how
many there are, the elements as they are, as float32, positions in few bits; the decoder divides. With `scaled=False`
it does not: biased, on average a contraction with delta = p, with error feedback (sparsified SGD with memory).

Source: Stich et al. 2018, section 2; Wangni et al. 2018, with equal probabilities. Differences: elements are chosen
independently of each other, so that their number varies. p is the multiple of 2^-16 next to `ratio`, because random
numbers have 16 bits, and it is this p that the decoder divides by. So that a payload has a bound, elements beyond the
first 2 p N + 64 are dropped, which happens with a probability below e^-70.
"""
# Shapes: N = elements of the tensor or range

from __future__ import annotations

import math
from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.lang import ceil, concat, random


def probability(ratio: float) -> float:
    """The probability p with which an element is kept: a random number of 16 bits is below it so often."""
    return max(1, math.ceil(ratio * 65536 - 0.5)) / 65536


@compressor(
    feedback=lambda scaled, **_: "none" if scaled else "error",
    unbiased=lambda scaled, **_: scaled,
    variance=lambda size, ratio, **_: 1 / probability(ratio) - 1,
)
def randomk(g: Any, ratio: float = 0.01, scaled: bool = True) -> Any:
    """A random part of the elements, enlarged so that the mean is the gradient.

    Args:
        g: the gradient.
        ratio: probability of an element to be kept, rounded to a multiple of 2^-16.
        scaled: enlarge them; else the rest waits in the residual.
    """
    p = probability(ratio)
    kept = g.filter(lambda _: random() < p, at_most=ceil(2 * p * g.size) + 64)
    return concat(index=kept.index, value=kept.value)


@randomk.decode
def _(p: Any, ratio: float, scaled: bool) -> Any:
    return (p.value * (1 / probability(ratio)) if scaled else p.value).scatter(p.index)
