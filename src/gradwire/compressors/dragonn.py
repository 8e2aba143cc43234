"""DRAGONN: each large element goes to a slot that a hash of its position selects, and the largest of a slot is sent.

Biased; on average a contraction by lemma A.8 of the paper, so it needs error feedback. Of ceil(ratio · N) slots,
`load` times as many large elements fill the fraction 1 - exp(-load), and that is how many elements are sent. They are a
fraction of (1 - exp(-load)) / load of those large elements: 63 % with a load of 1. All others remain in the residual,
and factor masking stops the velocity of the large ones among them, since they were selected, too.

Body: number of elements, values as float32, positions in few bits; see `gradwire.lang.operators.hash` for the slots.

Source: Wang et al. 2022, algorithm 1. Differences:

- The hash is drawn for each step, rank and tensor, so that no element loses in every step.
- The largest magnitude of a slot stays, of equal ones the first; in the paper, the last to be written. So no position
  is preferred, and a larger element never makes way for a smaller one.
- The threshold is exact up to the noise of collisions. The sampled one is only a bound, two to one tenth too low by
  three standard deviations. Of the slots that it fills, the largest 1 - exp(-load) stay, as many as elements above the
  true threshold would have filled. If more elements than that equal the threshold, larger ones still come first. The
  load is then off by sqrt((exp(load) - 1 - load) / slots): below 10 % from 72 slots on, with a load of 1.
- The sample has 4 expected elements above the threshold or 1/4096 of the gradient, whichever is larger; for small
  tensors 1/1024, up to 8,192 elements. The paper samples 1 %, which is too few for small tensors, and for large ones
  costs more than all else.
- With `carry`, the bound comes from the smallest magnitude sent in the previous step.
- Empty slots and zeros are not sent.
"""
# Shapes: N = elements of the tensor or range, K = elements sent

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradwire.compressors.base.array import SMALLEST
from gradwire.compressors.base.decorator import compressor
from gradwire.compressors.support.warmup import ratio_at, warmed
from gradwire.lang import ceil, concat, maximum, minimum, previous_state, sqrt, where

_FEW_SLOTS = 256  # below this, the number of filled slots is a poor estimate, and sampling is cheap
_TOO_FEW = 0.5  # of the elements that should have been sent: the bound was far too high
_MARGIN = 0.95  # of a carried threshold to the smallest magnitude sent; gradients change from step to step
# Exponent of the load in the correction of the threshold. The number of elements falls with the threshold to a power
# of 2 (heavy tails) to 14 (a normal distribution at 0.0001), so each step multiplies the error by 0.75 to -0.75.
_CORRECTION = 1 / 8


def corrected(
    body: np.ndarray, size: int, step: int, *, ratio: float, warmup: int, load: float, **_: Any
) -> np.ndarray:
    """Bound of the next step: a little below the smallest magnitude sent, lower still if too few elements were sent.

    A load of `load` fills a fraction of 1 - exp(-load) of the slots.
    """
    slots = max(1.0, ratio_at(ratio, warmup, step) * size)
    kept = int(body[:4].view(np.uint32)[0])
    if slots < _FEW_SLOTS or kept < _TOO_FEW * filled(load) * slots:
        return np.zeros(1, np.float32)
    least = float(np.abs(body[4 : 4 + 4 * kept].view(np.float32)).min())
    found = -math.log1p(-min(kept / slots, filled(load)))
    return np.array([_MARGIN * least * (found / load) ** _CORRECTION], np.float32)


def filled(load: float) -> float:
    """Expected fraction of filled slots."""
    return -math.expm1(-load)


@compressor(next_state=corrected)
def dragonn(g: Any, ratio: float = 0.001, load: float = 1.0, warmup: int = 0, carry: bool = False) -> Any:
    """Hashed selection: reads the gradient once, for any ratio.

    Args:
        g: Gradient.
        ratio: Number of slots, as a fraction of the elements; 1 - exp(-`load`) of them are filled and sent.
        load: Large elements per slot. With more, more slots are filled, and more of the large elements lose.
        warmup: Steps in which that fraction falls to `ratio`, from 25 % on.
        carry: If true, take the bound of large elements from the previous step when there is one.
    """
    before = previous_state() if carry else 0.0
    part = maximum(minimum(ceil(g.size / 1024), 8192), ceil(g.size / 4096))
    count = maximum(ceil(4 / (ratio * load)), part)
    sizes = abs(g).sample(where(before > 0, 1, count) if carry else count).sort(descending=True)
    now = warmed(ratio, warmup)
    large = now * load * sizes.size
    bound = maximum(sizes[ceil(large + 3 * sqrt(large)) - 1], SMALLEST)  # zeros are not sent
    if carry:
        bound = where(before > 0, before, bound)
    slots = ceil(now * g.size)
    kept = g.filter(lambda x: abs(x) >= bound).hash(slots).top(ceil(filled(load) * slots))
    return concat(index=kept.index, value=kept.value)


@dragonn.decode
def _(p: Any) -> Any:
    return p.value.scatter(p.index)
