"""Gradient dropping: elements below a sampled quantile of magnitudes are dropped, the rest is sent as it is.

Biased; a contraction with delta >= 1/N (the largest element is always kept), so it needs error feedback. Payloads
cannot be summed. Body: how many there are, values as float32, positions in few bits.

Source: Aji and Heafield 2017, section 3; HiPress (Bai et al. 2021), section 4.4. Differences: the sample is
stratified, and has 2 / `ratio` elements at least, and 100 / `ratio` at most, so that no more than 100 of it are
expected above the threshold, which is estimate enough. At most twice as many elements are sent as the ratio says, the
largest, so that a payload has a bound; magnitudes that equal the threshold are kept.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.compressors.support.warmup import warmed
from gradwire.lang import ceil, concat, maximum, minimum


@compressor(contraction=lambda size, **_: 1 / max(1, size))
def graddrop(g: Any, ratio: float = 0.01, sample: float = 0.01, warmup: int = 0) -> Any:
    """Drop what is below a sampled quantile of magnitudes.

    Args:
        g: the gradient.
        ratio: fraction to keep, about.
        sample: sampled fraction, of at most 100 / `ratio` elements.
        warmup: steps in which the fraction falls to `ratio`, from 25 % on.
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
