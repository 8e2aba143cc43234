"""signSGD with the mean magnitude: a bit an element for its sign, one float for all magnitudes.

Biased; a contraction with delta >= 1/N, so it needs error feedback. Payloads cannot be summed.

Source: Bernstein et al. 2018; Karimireddy et al. 2019, algorithm 1 (EF-signSGD). Differences: signs are scaled by the
mean magnitude and the error is fed back, without which signSGD need not converge; a zero counts as positive. There is
no majority vote of plain signs: a sum of decoded payloads is what the contract knows. Where an aggregate is encoded
anew (scatter-reduce, server), its signs are the majority's, each rank's vote weighted with its mean magnitude.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.traced import compressor
from gradwire.lang import concat, mean, uint1, where


@compressor(contraction=lambda size: 1 / max(1, size))
def signsgd(g: Any) -> Any:
    """Signs, scaled by the mean magnitude."""
    return concat(scale=abs(g).reduce(mean), up=g.map(lambda x: x >= 0, dtype=uint1))


@signsgd.decode
def _(p: Any) -> Any:
    return where(p.up == 1, p.scale, -p.scale)
