"""1-bit SGD with two means: one bit per element for its sign, and the mean of the elements of each sign.

Biased; a contraction with δ ≥ 1/N, so it needs error feedback: the n elements g of each sign keep at least 1/n of their
energy, because (Σ|g|)² / n ≥ Σg² / n, and n ≤ N.

Body: the mean of the negative and of the other elements as float32, then one bit per element.

Source: Seide et al. 2014, section 3; the variant of HiPress, which sends the means of the negative and of the other
elements. Differences: none in the algorithm.
"""
# Shapes: N = elements of the tensor or range, n = elements of one sign

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, mean, uint1, where


@compressor(feedback="error", contraction=lambda size: 1 / max(1, size))
def onebit(g: Any) -> Any:
    """1-bit SGD with two means: one bit per element, and the means of the negative and of the other elements."""
    low = g.filter(lambda x: x < 0).reduce(mean)
    high = g.filter(lambda x: x >= 0).reduce(mean)
    sign = g.map(lambda x: x >= 0, dtype=uint1)
    return concat(low=low, high=high, sign=sign)


@onebit.decode
def _(p: Any) -> Any:
    return p.sign.map(lambda s: where(s == 1, p.high, p.low))
