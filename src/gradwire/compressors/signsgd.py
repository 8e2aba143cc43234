"""signSGD with majority vote: a bit an element for its sign, one magnitude for all, shared by all ranks.

Biased; a contraction with delta >= 1/N where the magnitude is its own, so it needs error feedback: a rank of smaller
gradients votes above its means, and takes it back in the next step. Payloads cannot be summed.

The magnitude is the largest of the ranks' mean magnitudes, found in a preliminary round, so that all votes weigh
alike. With scatter-reduce the signs of an aggregate are those of the majority; with all-gather all ranks end with the
mean of the votes.

Source: Bernstein et al. 2018, algorithm 3 (majority vote); Karimireddy et al. 2019, algorithm 1 (the magnitude and
error feedback). Differences: signs have a magnitude and the error is fed back, without which signSGD need not
converge (`feedback="none"` leaves it out); a zero, and a vote that is even, count as positive.
"""

from __future__ import annotations

from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.lang import concat, mean, uint1, where


@compressor(contraction=lambda size: 1 / max(1, size), votes=True)
def signsgd(g: Any) -> Any:
    """Signs, with a magnitude that all ranks share, and a majority vote over them."""
    scale = abs(g).reduce(mean).over_ranks(max)
    return concat(scale=scale, up=g.map(lambda x: x >= 0, dtype=uint1))


@signsgd.decode
def _(p: Any) -> Any:
    return where(p.up == 1, p.scale, -p.scale)
