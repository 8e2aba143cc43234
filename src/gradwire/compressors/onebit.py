"""1-bit SGD with two means: one bit per element for its sign, and the mean of the elements of each sign.

Biased; a contraction with δ ≥ 1/N, so it needs error feedback: the n elements g of each sign keep at least 1/n of their
energy, because (Σ|g|)² / n ≥ Σg² / n, and n ≤ N. With option `block`, each block has means of its own, and n ≤ B.

Body: the mean of the negative and of the other elements as float32, then one bit per element. With blocks, the first
means of all ceil(N/B) blocks, then the second ones, then the bits.

Source: Seide et al. 2014, section 3, which has means per column of a matrix; the variant of HiPress, which sends the
means of the negative and of the other elements of a tensor. Differences: blocks are consecutive elements.
"""
# Shapes: N = elements of the tensor or range, n = elements of one sign, B = block

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, count, maximum, mean, minimum, uint1, where


@compressor(feedback="error", contraction=lambda size, block: 1 / max(1, min(block or size, size)))
def onebit(g: Any, block: int = 0) -> Any:
    """1-bit SGD with two means: one bit per element, and the means of the negative and of the other elements.

    Args:
        g: Gradient.
        block: Elements that share the two means, from 8; 0 for all of the tensor. 1,024 add 1/16 bit per element.
    """
    sign = g.map(lambda x: x >= 0, dtype=uint1)
    if block == 0:
        low = g.filter(lambda x: x < 0).reduce(mean)
        high = g.filter(lambda x: x >= 0).reduce(mean)
    else:
        low = minimum(g, 0).blocks(block).reduce(sum) / maximum((g < 0).blocks(block).reduce(count), 1)
        high = maximum(g, 0).blocks(block).reduce(sum) / maximum((g >= 0).blocks(block).reduce(count), 1)
    return concat(low=low, high=high, sign=sign)


@onebit.decode
def _(p: Any) -> Any:
    return p.sign.map(lambda s: where(s == 1, p.high, p.low))
