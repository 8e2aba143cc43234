"""1-bit quantization of minimum squared error: elements on each side of zero become their mean.

Biased; a contraction with δ ≥ 1/N, so it needs error feedback.

Body: the mean of the negative and of the other elements as float32, then one bit per element.

Source: Seide et al. 2014, section 3, as in the comparison of 3LC (Lim et al. 2019), sections 2.2 and 5. Differences:
one pair of means per tensor instead of one per column of a matrix, as in 3LC. With that it is the algorithm of
`onebit`, byte for byte; it is registered under the names of both papers.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, mean, uint1, where


@compressor(contraction=lambda size: 1 / max(1, size))
def mqe1bit(g: Any) -> Any:
    """1-bit quantization of minimum squared error: one bit per element, and the mean of each side of zero."""
    low = g.filter(lambda x: x < 0).reduce(mean)
    high = g.filter(lambda x: x >= 0).reduce(mean)
    return concat(low=low, high=high, side=g.map(lambda x: x >= 0, dtype=uint1))


@mqe1bit.decode
def _(p: Any) -> Any:
    return where(p.side == 1, p.high, p.low)
