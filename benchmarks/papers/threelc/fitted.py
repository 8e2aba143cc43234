"""3LC's three values with another scale: the mean magnitude of the elements that are sent, instead of M.

With M = s · max |x|, every element that is sent is overstated: by 1 / (1 - 0.05) to 1.9 times for s = 1.9. Its residual
then has almost the size of the element and the opposite sign, and is sent back later. Here the same elements are sent
with the one value that leaves the least error. A training with both tells what the overstatement costs.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.lang import apply, concat, mean, sign, trit, where


@compressor(contraction=lambda size, sparsity: 1 / max(1, size))
def fitted(g: Any, sparsity: float = 1.0) -> Any:
    """The elements that 3LC sends, as plus or minus their mean magnitude.

    Args:
        g: Gradient.
        sparsity: Sparsity multiplier s, 1 <= s < 2; a larger one sends fewer elements.
    """
    largest = abs(g).reduce(max)
    M = apply("narrow", sparsity * largest)
    M = where(largest > M - largest, M, largest)
    q = g.map(lambda x: where(abs(x) > M - abs(x), sign(x), 0.0), dtype=trit)
    return concat(scale=abs(g).filter(lambda x: x > M - x).reduce(mean), q=q.zero_runs())


@fitted.decode
def _(p: Any) -> Any:
    return p.q * p.scale
