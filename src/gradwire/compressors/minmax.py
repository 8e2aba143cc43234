"""Stochastic quantisation to b bits: 2^b levels from the smallest element to the largest.

Unbiased to 2^-17 of a level's width, so that it needs no error feedback. Payloads cannot be summed. A gradient whose
largest and smallest element lie further apart than the largest float32 is clamped.

Source: HiPress (Bai et al. 2021), figure 5, which calls it TernGrad. Differences: a constant gradient has levels of
width 0 and is exact. The name `terngrad` is that of the algorithm that Wen et al. published.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, floor, random, uint


@compressor(feedback="none", unbiased=True)
def minmax(g: Any, bits: int = 2) -> Any:
    """Stochastic quantisation to b bits, between the smallest and the largest element.

    Args:
        g: the gradient.
        bits: 1, 2, 4 or 8 bits an element.
    """
    low, high = g.reduce(min), g.reduce(max)
    gap = (high - low) / (2**bits - 1)
    q = g.map(lambda x: floor((x - low) / gap + random(0, 1)), dtype=uint(bits))
    return concat(low=low, gap=gap, q=q)


@minmax.decode
def _(p: Any) -> Any:
    return p.q.map(lambda q: q * p.gap + p.low)
