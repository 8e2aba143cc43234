"""Gradient dropping: elements below a sampled quantile of magnitudes are dropped, the others are sent.

Biased; a contraction with δ ≥ 1/N, since the largest element is always kept, so it needs error feedback.

Body: number of elements, values as float32, positions in few bits.

Source: Aji and Heafield 2017, section 3; HiPress (Bai et al. 2021), section 4.4. Differences: the sample is stratified.
It has at least 2 / `ratio` elements, and at most 100 / `ratio`, of which 100 are expected above the threshold: enough
for a good estimate. At most 2 · ceil(ratio · N) elements are sent, the largest ones, so that payloads have a bound.
Magnitudes equal to the threshold are kept.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.compressors.support.warmup import warmed
from gradwire.lang import ceil, concat, maximum, minimum


@compressor(contraction=lambda size, **_: 1 / max(1, size))
def graddrop(g: Any, ratio: float = 0.01, sample: float = 0.01, warmup: int = 0) -> Any:
    """Drop elements below a sampled quantile of magnitudes.

    Args:
        g: Gradient.
        ratio: Approximate fraction to keep.
        sample: Sampled fraction; at most 100 / `ratio` elements are sampled.
        warmup: Steps in which the fraction falls to `ratio`, from 25 % on.
    """
    count = minimum(maximum(ceil(sample * g.size), ceil(2 / ratio)), ceil(100 / ratio))
    sizes = abs(g).sample(count).sort(descending=True)
    now = warmed(ratio, warmup)
    quantile = sizes[ceil(now * sizes.size) - 1]
    kept = g.filter(lambda x: abs(x) >= quantile).top(2 * ceil(now * g.size))
    return concat(index=kept.index, value=kept.value)


@graddrop.decode
def _(p: Any) -> Any:
    return p.value.scatter(p.index)
