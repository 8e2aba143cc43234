"""Stochastic quantization to b bits: 2^b levels from the smallest to the largest element.

Unbiased to 2⁻¹⁷ of the distance between levels, so it needs no error feedback; from level 128 on, with 8 bits, to 2⁻¹⁶,
because float32 ties go to even there. Levels are rounded to float32, which counts where the smallest element is much
larger than their distance. Elements are biased if the largest and the smallest lie further apart than the largest
float32.

Body: the smallest element and the distance between levels as float32, then b bits per element.

Source: HiPress (Bai et al. 2021), figure 5, which calls it TernGrad. Differences: a constant gradient has levels of
distance 0 and is exact. The name `terngrad` belongs to the algorithm that Wen et al. published.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, floor, random, uint


@compressor(feedback="none", unbiased=True)
def minmax(g: Any, bits: int = 2) -> Any:
    """Stochastic quantization to b bits, between the smallest and the largest element.

    Args:
        g: Gradient.
        bits: 1, 2, 4 or 8 bits per element.
    """
    low, high = g.reduce(min), g.reduce(max)
    gap = (high - low) / (2**bits - 1)
    q = g.map(lambda x: floor((x - low) / gap + random(0, 1)), dtype=uint(bits))
    return concat(low=low, gap=gap, q=q)


@minmax.decode
def _(p: Any) -> Any:
    return p.q.map(lambda q: q * p.gap + p.low)
