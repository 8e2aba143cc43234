"""TernGrad: three values {-s, 0, s} per element, drawn so that their expected value is the clipped gradient.

Unbiased to 2⁻¹⁷ of s without clipping (`clip` = 0). With clipping, the part beyond `clip` standard deviations is lost;
error feedback would not help, because the noise is no contraction.

Body: s as float32, unless it was shared, then trits, five in a byte.

Source: Wen et al. 2017, section 3: ternarizing, gradient clipping, scaler sharing. Differences: the standard deviation
is taken about 0 instead of the mean, so that a constant gradient is not clipped. With a preliminary round, s is the
largest of all ranks and does not travel; without one it is the rank's own.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, minimum, norm, random, sign, sqrt, trit, where


@compressor(feedback="none", unbiased=lambda clip: clip == 0)
def terngrad(g: Any, clip: float = 2.5) -> Any:
    """Stochastic ternary values with one scale, which all ranks share, after clipping.

    Args:
        g: Gradient.
        clip: Standard deviations beyond which elements are clipped; 0 for no clipping, which is unbiased.
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
