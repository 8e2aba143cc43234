"""Threshold sparsification: keep the elements whose magnitude reaches a share of the largest, as (index, value) pairs.

Biased; a contraction with delta >= 1/N (the largest element is always kept), so it needs error feedback. Payloads
cannot be summed. Body: how many there are, values as float32, positions in few bits. How many there are follows from
the gradient alone: a constant gradient is sent as a whole, and a bit more for each element.

Source: Dutta et al. 2020, section 3, hard threshold. Differences: theirs is a number that is fixed for a training;
ours is relative to the largest magnitude, so that it fits every layer and something is always sent. Zeros are not
sent.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base import options
from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat


@compressor(contraction=lambda size, **_: 1 / max(1, size))
def threshold(g: Any, threshold: float = 0.5) -> Any:
    """Elements whose magnitude reaches a share of the largest.

    Args:
        g: the gradient.
        threshold: that share, 0 to 1.
    """
    least = options.real("threshold", threshold, 0.0, 1.0) * abs(g).reduce(max)
    kept = g.filter(lambda x: (abs(x) >= least) & (x != 0))
    return concat(index=kept.index, value=kept.value)


@threshold.decode
def _(p: Any) -> Any:
    return p.value.scatter(p.index)
