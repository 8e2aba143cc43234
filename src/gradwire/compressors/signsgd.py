"""signSGD with majority vote: one bit per element for its sign, and one magnitude that all ranks share.

Biased, so it needs error feedback: a contraction with δ ≥ 1/N if the magnitude is the rank's own. A rank with smaller
gradients sends more than its mean magnitude, and corrects it in the next step.

The magnitude is the largest of the ranks' mean magnitudes, which a preliminary round finds, so that all votes have
equal weight. With scatter-reduce, the signs of an aggregate are those of the majority; with all-gather, all ranks get
the mean of the votes.

Body: the magnitude as float32, unless it was shared, then one bit per element.

Source: Bernstein et al. 2018, algorithm 3 (majority vote); Karimireddy et al. 2019, algorithm 1 (magnitude and error
feedback). Differences: signs have a magnitude and errors are fed back, without which signSGD need not converge
(`feedback="none"` turns that off). Zeros and tied votes count as positive.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, mean, uint1, where


@compressor(contraction=lambda size: 1 / max(1, size), encode_own_before_merge=True)
def signsgd(g: Any) -> Any:
    """Signs with a magnitude that all ranks share, and a majority vote."""
    scale = abs(g).reduce(mean).over_ranks(max)
    return concat(scale=scale, up=g.map(lambda x: x >= 0, dtype=uint1))


@signsgd.decode
def _(p: Any) -> Any:
    return where(p.up == 1, p.scale, -p.scale)
