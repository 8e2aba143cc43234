"""Natural compression: each element is rounded at random to one of the two nearest powers of two, in nine bits.

Unbiased to 2⁻¹⁷ of an element, with a variance of at most ‖g‖²/8, so it needs no error feedback.

Body: biased exponents of float32, one byte each, then one sign bit per element.

Source: Horváth et al. 2019, section 2.1. Differences: subnormal elements, below 1.2e-38, become 0. Above 2^127, the
higher neighbor is the largest float32.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, exponent, power, random, uint1, uint8, where


@compressor(feedback="none", unbiased=True, variance=lambda size: 1 / 8)
def natural(g: Any) -> Any:
    """Stochastic rounding to powers of two: an exponent and a sign per element."""

    def rounded(x: Any) -> Any:
        below = power(exponent(x))
        up = (random() * below < abs(x) - below) & (below > 0)
        return exponent(x) + where(up, 1.0, 0.0)

    return concat(e=g.map(rounded, dtype=uint8), minus=g.map(lambda x: x < 0, dtype=uint1))


@natural.decode
def _(p: Any) -> Any:
    return where(p.minus == 1, -power(p.e), power(p.e))
