"""AdaComp: of each bin the elements near its largest magnitude are sent as plus or minus that; a trit an element.

Biased; a contraction with delta >= 1 / min(block, N), so it needs error feedback. Payloads cannot be summed. Body: the
largest magnitude of each bin as float32, then -1, 0 or 1 for each element, five in a byte.

Source: Chen et al. 2018, section 3. Differences: they send an element where residual + 2 · gradient reaches the bin's
largest |residual + gradient|. A compressor sees the compensated gradient alone, the sum of the two, and sends where
its magnitude reaches `threshold` times the bin's largest: 1/2 is what theirs is without a residual, 1 what it tends to
as residuals grow. Magnitudes are the bin's own and not their mean over the tensor, which makes it a contraction. All
elements have a place in the payload, where theirs lists the chosen ones.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base import options
from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, sign, trit, where


@compressor(contraction=lambda size, block, **_: 1 / max(1, min(block, size)))
def adacomp(g: Any, block: int = 512, threshold: float = 0.8) -> Any:
    """Elements near the largest magnitude of their bin, as plus or minus that.

    Args:
        g: the gradient.
        block: elements a bin.
        threshold: share of its bin's largest magnitude that an element must reach, 1/2 to 1.
    """
    options.real("threshold", threshold, 0.5, 1.0)
    largest = abs(g).blocks(block).reduce(max)
    q = g.map(lambda x: where(abs(x) >= threshold * largest, sign(x), 0.0), dtype=trit)
    return concat(largest=largest, q=q)


@adacomp.decode
def _(p: Any) -> Any:
    return p.q * p.largest
