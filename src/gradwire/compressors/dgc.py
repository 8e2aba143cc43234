"""Deep gradient compression: the elements above a sampled threshold, and of these at most the K largest.

Biased; a contraction with δ ≥ 1/N, since the largest element is always kept, so it needs error feedback.
K = ceil(ratio · N). Fewer elements are sent if the sampled threshold is too high.

Body: number of elements, values as float32, positions in few bits.

Source: Lin et al. 2018, section 3.1 and hierarchical selection. Differences: the sample is stratified. It has at least
2 / `ratio` elements, so that its threshold is not just the largest sample, and at most 100 / `ratio`, of which 100 are
expected above the threshold: enough for a good estimate. A threshold that is too high is not lowered. The warm-up
(section 3.3) is counted in steps, not epochs. Momentum correction, factor masking and clipping are part of the
residuals: `feedback="momentum"`.
"""
# Shapes: N = elements of the tensor or range, K = elements kept at most

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.compressors.support.warmup import warmed
from gradwire.lang import ceil, concat, maximum, minimum


@compressor(contraction=lambda size, **_: 1 / max(1, size))
def dgc(g: Any, ratio: float = 0.001, sample: float = 0.01, warmup: int = 0) -> Any:
    """Top-k by a sampled threshold: the elements above it, and of these the largest.

    Args:
        g: Gradient.
        ratio: Kept fraction.
        sample: Sampled fraction; at most 100 / `ratio` elements are sampled.
        warmup: Steps in which the kept fraction falls to `ratio`: a quarter of them with 25 % kept, then 6.25 %,
            1.6 % and 0.4 %.
    """
    count = minimum(maximum(ceil(sample * g.size), ceil(2 / ratio)), ceil(100 / ratio))
    sizes = abs(g).sample(count).sort(descending=True)
    now = warmed(ratio, warmup)
    threshold = sizes[ceil(now * sizes.size) - 1]
    kept = g.filter(lambda x: abs(x) >= threshold).top(ceil(now * g.size))
    return concat(index=kept.index, value=kept.value)


@dgc.decode
def _(p: Any) -> Any:
    return p.value.scatter(p.index)
