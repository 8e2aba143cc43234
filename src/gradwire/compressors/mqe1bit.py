"""1-bit quantisation of minimum squared error: each side of zero becomes its mean, the error waits.

Biased; a contraction with delta >= 1/N, so it needs error feedback. Payloads cannot be summed. Body: the two means,
then a bit an element.

Source: Seide et al. 2014, section 3, as 3LC (Lim et al. 2019), sections 2.2 and 5, takes it for its comparison.
Differences: one pair of means a tensor and not one a column of a matrix, as in 3LC. That makes it the algorithm of
`onebit`, byte for byte; both papers' names are there.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, mean, uint1, where


@compressor(contraction=lambda size: 1 / max(1, size))
def mqe1bit(g: Any) -> Any:
    """1-bit quantisation of minimum squared error: a bit an element, the mean of each side of zero."""
    low = g.filter(lambda x: x < 0).reduce(mean)
    high = g.filter(lambda x: x >= 0).reduce(mean)
    return concat(low=low, high=high, side=g.map(lambda x: x >= 0, dtype=uint1))


@mqe1bit.decode
def _(p: Any) -> Any:
    return where(p.side == 1, p.high, p.low)
