"""TernGrad: three values {-s, 0, s} an element, drawn so that their mean is the clipped gradient, five in a byte.

Unbiased to 2^-17 of s without clipping (`clip` = 0); with it, what lies beyond `clip` standard deviations is lost, and
error feedback would not help, because the noise is no contraction. Payloads cannot be summed.

Source: Wen et al. 2017, section 3: ternarising, gradient clipping, scaler sharing. Differences: the standard
deviation is about 0, not about the mean, so that a constant gradient is not clipped. With a preliminary round s is
the largest of all ranks and does not travel; without one it is the rank's own.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, minimum, norm, random, sign, sqrt, trit, where


@compressor(feedback="none", unbiased=lambda clip: clip == 0)
def terngrad(g: Any, clip: float = 2.5) -> Any:
    """Stochastic ternary values of one scale, which all ranks share, after clipping.

    Args:
        g: the gradient.
        clip: standard deviations beyond which elements are clipped; 0 for no clipping, which is unbiased.
    """
    limit = abs(g).reduce(max)
    if clip:
        limit = minimum(limit, clip * sqrt(g.reduce(norm) * g.reduce(norm) / g.size))
    s = limit.over_ranks(max)
    q = g.map(lambda x: sign(x) * where(random() < minimum(abs(x), limit) / s, 1.0, 0.0), dtype=trit)
    return concat(s=s, q=q)


@terngrad.decode
def _(p: Any) -> Any:
    return p.q * p.s
