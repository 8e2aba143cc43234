"""MSTopk: top-k by counting at several thresholds per read, which closes in on the k-th largest magnitude.

Biased; a contraction with δ = k/N, where k = ceil(ratio · N), so it needs error feedback.

1. Count the magnitudes at or above each of eight thresholds, from 1/32 of the mean magnitude to the largest magnitude.
2. Repeat between the two neighboring thresholds that have the k-th largest magnitude between them.
3. Of the elements at or above the lower of the final two, which are at least k and few more, take the k largest.

Body: number of elements, values as float32, positions in few bits.

Source: Shi et al. 2021 ("Toward scalable distributed training of deep learning on public cloud clusters"), section 3.
Differences: the paper counts at one threshold per read, 30 times; here the gradient is read four times. Thresholds have
equal ratios instead of equal differences, because tails are heavy, and begin below the mean, since a warm-up keeps many
elements. The paper fills up with the next elements in memory, we with the largest, so the result is exact. If fewer
than k elements reach the lowest threshold, all elements are considered.
"""
# Shapes: N = elements of the tensor or range

from __future__ import annotations

import itertools
from typing import Any

from gradwire.compressors.base.decorator import compressor
from gradwire.compressors.support.warmup import warmed
from gradwire.lang import ceil, concat, count, mean, sqrt, where

_HALVINGS = 3  # of the interval on a logarithmic scale: 2^3 - 1 thresholds between its ends
_SWEEPS = 2


@compressor(contraction=lambda size, ratio, **_: ratio)
def mstopk(g: Any, ratio: float = 0.01, warmup: int = 0) -> Any:
    """Top-k by counting at several thresholds per read.

    Args:
        g: Gradient.
        ratio: Kept fraction.
        warmup: Steps in which the kept fraction falls to `ratio`, from 25 % on.
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
