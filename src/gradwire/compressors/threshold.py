"""Threshold sparsification: elements whose magnitude reaches a fraction of the largest, as (index, value) pairs.

Biased; a contraction with δ ≥ 1/N, since the largest element is always kept, so it needs error feedback. The number of
elements depends on the gradient alone: a constant gradient is sent whole, with one more bit per element.

Body: number of elements, values as float32, positions in few bits.

Source: Dutta et al. 2020, section 3, hard threshold. Differences: the paper's threshold is a number that is fixed for a
training; here it is relative to the largest magnitude, so that it fits every layer and something is always sent. Zeros
are not sent.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base import options
from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat


@compressor(contraction=lambda size, **_: 1 / max(1, size))
def threshold(g: Any, threshold: float = 0.5) -> Any:
    """Elements whose magnitude reaches a fraction of the largest.

    Args:
        g: Gradient.
        threshold: That fraction, from 0 to 1.
    """
    least = options.real("threshold", threshold, 0.0, 1.0) * abs(g).reduce(max)
    kept = g.filter(lambda x: (abs(x) >= least) & (x != 0))
    return concat(index=kept.index, value=kept.value)


@threshold.decode
def _(p: Any) -> Any:
    return p.value.scatter(p.index)
