"""Threshold binary quantization: elements of magnitude τ or more are sent as plus or minus τ; two bits per element.

Biased; a contraction with δ ≥ min(1, threshold) / N, so it needs error feedback, which keeps all other elements.

Body: τ as float32, then two bits per element.

Source: Strom 2015, section 2; two bits per element as in HiPress (Bai et al. 2021), section 4.4. Differences: τ is
`threshold` times the mean magnitude and travels in the payload, because no fixed τ fits all layers and all phases of
training. It is at most the largest magnitude, so that something is always sent. Strom sends indices of 31 bits and
compresses them with an entropy coder.
"""

from __future__ import annotations

import math
from typing import Any

from gradwire.compressors.base import options
from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, mean, minimum, uint2, where


@compressor(contraction=lambda size, threshold: min(1.0, threshold) / max(1, size))
def tbq(g: Any, threshold: float = 2.0) -> Any:
    """Threshold binary quantization: plus or minus tau for elements that reach tau, 0 for the others.

    Args:
        g: Gradient.
        threshold: tau in units of the mean magnitude, above 0.
    """
    options.real("threshold", threshold, 0.0, math.inf, low_open=True, high_open=True)
    tau = minimum(threshold * abs(g).reduce(mean), abs(g).reduce(max))
    q = g.map(lambda x: where(x >= tau, 2.0, where(x <= -tau, 0.0, 1.0)), dtype=uint2)
    return concat(tau=tau, q=q)


@tbq.decode
def _(p: Any) -> Any:
    return (p.q - 1) * p.tau
