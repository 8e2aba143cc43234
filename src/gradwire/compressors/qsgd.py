"""QSGD: each element becomes a sign and one of s levels of the Euclidean norm of its bucket, rounded at random.

Unbiased to 2⁻¹⁷ of a level, so it needs no error feedback; the variance is at most min(d/s², √d/s) ‖g‖² for buckets of
d elements. s = 2^(bits-1) - 1.

Body: one norm per bucket as float32, then the levels; values above s are negative levels.

Source: Alistarh et al. 2017, section 3.1; section 4 for buckets. Differences: levels are sent as fixed-size integers
instead of Elias codes, so that sizes are known and decoding is one sweep. Norms are at most the largest float32.
"""
# Shapes: N = elements of the tensor or range, d = elements of a bucket

from __future__ import annotations

import math
from typing import Any

from gradwire.compressors.base import options
from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, floor, minimum, norm, random, uint, where


def _variance(size: int, bits: int, block: int) -> float:
    d, s = min(block, size), (1 << bits - 1) - 1
    return min(d / s**2, math.sqrt(d) / s)


@compressor(feedback="none", unbiased=True, variance=_variance)
def qsgd(g: Any, bits: int = 4, block: int = 512) -> Any:
    """Stochastic levels of the Euclidean norm, bucket by bucket.

    Args:
        g: Gradient.
        bits: Bits of an element with its sign: 2, 4 or 8.
        block: Elements of a bucket.
    """
    s = (1 << options.integer("bits", bits, 2, 8) - 1) - 1
    length = g.blocks(block).reduce(norm)
    level = g.map(lambda x: minimum(floor(abs(x) / length * s + random()), s))
    return concat(length=length, q=where(g < 0, level + (s + 1), level).map(dtype=uint(bits)))


@qsgd.decode
def _(p: Any, bits: int) -> Any:
    s = (1 << bits - 1) - 1
    unit = p.length / s
    return where(p.q > s, (s + 1) - p.q, p.q) * unit
