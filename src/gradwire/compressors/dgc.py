"""Deep gradient compression: the elements above a sampled threshold, and of these no more than the largest K.

Biased; a contraction with delta >= 1/N (the largest element is always kept), so it needs error feedback. Payloads
cannot be summed. K = ceil(ratio N). Body: how many there are, values as float32, positions in few bits; fewer than K
where the sample put the threshold too high.

Source: Lin et al. 2018, section 3.1 and hierarchical selection. Differences: the sample is stratified, and has 2 /
`ratio` elements at least, so that its threshold is not the largest sample alone, and 100 / `ratio` at most, so that no
more than 100 of it are expected above the threshold, which is estimate enough; a threshold that turns out too high is
not lowered. The warm-up (section 3.3) is counted in steps, for there are no epochs here. Momentum correction, factor
masking and clipping belong to the residuals: `feedback="momentum"`.
"""
# Shapes: N = elements of the tensor or range, K = elements kept at most

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.compressors.support.warmup import warmed
from gradwire.lang import ceil, concat, maximum, minimum


@compressor(contraction=lambda size, **_: 1 / max(1, size))
def dgc(g: Any, ratio: float = 0.001, sample: float = 0.01, warmup: int = 0) -> Any:
    """Top-k by a sampled threshold: what is above it, and of that the largest.

    Args:
        g: the gradient.
        ratio: kept fraction.
        sample: sampled fraction, of at most 100 / `ratio` elements.
        warmup: steps in which the kept fraction falls to `ratio`: a quarter of them with 25 % kept, then 6.25 %,
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
