"""MSTopk: top-k by counting at several thresholds a read, which closes in on the k-th largest magnitude.

Biased; a contraction with delta = k/N, so it needs error feedback. Payloads cannot be summed. k = ceil(ratio N). Body:
how many there are, values as float32, positions in few bits.

Magnitudes at or above a threshold are counted for eight thresholds in one sweep, and twice: first between 1/32 of the
mean magnitude and the largest, then between the two neighbours that have the k-th largest between them. What is at or
above the lower of the last two holds the k largest, and few more, of which the k largest are taken.

Source: Shi et al. 2021 ("Towards scalable distributed training of deep learning on public cloud clusters"), section 3.
Differences: they count at one threshold a read, 30 times; here the gradient is read four times. Thresholds have equal
ratios, not differences, for tails are heavy; they begin below the mean, for as much as warm-up keeps. They fill up with
elements next in memory, we with the largest: the result is exact. Where fewer than k reach the lowest threshold, all
elements are looked at.
"""
# Shapes: N = elements of the tensor or range

from __future__ import annotations

import itertools
from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.compressors.support.warmup import warmed
from gradwire.lang import ceil, concat, count, mean, sqrt, where

_HALVINGS = 3  # of the interval on a logarithmic scale, so that there are 2^3 - 1 thresholds
_SWEEPS = 2


@compressor(contraction=lambda size, ratio, **_: ratio)
def mstopk(g: Any, ratio: float = 0.01, warmup: int = 0) -> Any:
    """Top-k by counting at several thresholds a read.

    Args:
        g: the gradient.
        ratio: kept fraction.
        warmup: steps in which the kept fraction falls to `ratio`, from 25 % on.
    """
    k = ceil(warmed(ratio, warmup) * g.size)
    low, high = abs(g).reduce(mean) / 32, abs(g).reduce(max)
    for _ in range(_SWEEPS):
        edges = [low, high]
        for _ in range(_HALVINGS):
            edges = [edge for a, b in itertools.pairwise(edges) for edge in (a, sqrt(a * b))] + [high]
        enough = [g.filter(lambda x, t=t: abs(x) >= t).reduce(count) >= k for t in edges[:-1]]
        low, high = where(enough[0], low, 0.0), where(enough[0], high, low)
        for is_enough, edge, above in zip(enough[1:], edges[1:], edges[2:]):
            low, high = where(is_enough, edge, low), where(is_enough, above, high)
    kept = g.filter(lambda x: abs(x) >= low).top(k)
    return concat(index=kept.index, value=kept.value)


@mstopk.decode
def _(p: Any) -> Any:
    return p.value.scatter(p.index)
