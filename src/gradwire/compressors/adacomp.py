"""AdaComp: in each bin, elements near the largest magnitude are sent as plus or minus that magnitude.

Biased; a contraction with δ ≥ 1 / min(block, N), so it needs error feedback.

Body: the largest magnitude of each bin as float32, then -1, 0 or 1 for each element, five in a byte.

Source: Chen et al. 2018, section 3. Differences: the paper sends an element if |residual + 2 · gradient| reaches the
largest |residual + gradient| of its bin. A compressor sees only the compensated gradient, the sum of the two, and sends
an element if its magnitude reaches `threshold` times the largest: 1/2 is the paper's rule without a residual, and 1 its
limit as residuals grow. Each bin has its own magnitude, not the mean over the tensor, which makes this a contraction.
Every element has a place in the payload; the paper lists the chosen ones.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base import options
from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, sign, trit, where


@compressor(contraction=lambda size, block, **_: 1 / max(1, min(block, size)))
def adacomp(g: Any, block: int = 512, threshold: float = 0.8) -> Any:
    """Elements near the largest magnitude of their bin, as plus or minus that magnitude.

    Args:
        g: Gradient.
        block: Elements of a bin.
        threshold: Fraction of the largest magnitude in its bin that an element must reach, from 1/2 to 1.
    """
    options.real("threshold", threshold, 0.5, 1.0)
    largest = abs(g).blocks(block).reduce(max)
    q = g.map(lambda x: where(abs(x) >= threshold * largest, sign(x), 0.0), dtype=trit)
    return concat(largest=largest, q=q)


@adacomp.decode
def _(p: Any) -> Any:
    return p.q * p.largest
