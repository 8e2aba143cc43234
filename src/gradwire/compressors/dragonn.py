"""DRAGONN: each element above a threshold writes itself to a slot that a hash of its position selects.

Biased; on average a contraction by lemma A.8 of the paper, so it needs error feedback. There are ceil(ratio · N) slots
and about as many elements above the threshold. Several elements may select the same slot, and the last one stays: about
63 % of the slots are filled. All other elements remain in the residual.

Body: number of elements, values as float32, positions in few bits; see `gradwire.lang.operators.hash` for the slots.

Source: Wang et al. 2022, algorithm 1. Differences: the hash is drawn for each step, rank and tensor, so that no element
loses in every step. Empty slots and zeros are not sent. The threshold comes from a stratified sample of 8 / `ratio`
elements, of which 8 are expected above it; its error only changes how many slots are filled. The paper samples 1 % of
the elements, which is too few for small tensors, and for large ones costs more than all else. With `carry`, the
threshold is that of the previous step, corrected by the number of elements sent, while 30 to 90 % of the slots are
filled.
"""
# Shapes: N = elements of the tensor or range, K = elements sent

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradwire.compressors.base.array import SMALLEST
from gradwire.compressors.base.decorator import compressor
from gradwire.compressors.support.warmup import ratio_at, warmed
from gradwire.lang import ceil, concat, maximum, previous_state, where

_FEW_SLOTS = 256  # below this, the number of filled slots is a poor estimate, and sampling is cheap
_FULL = (0.3, 0.9)
# Exponent of the load in the correction of the threshold. The number of elements falls with the threshold to a power
# of 2 (heavy tails) to 14 (a normal distribution at 0.0001), so each step multiplies the error by 0.75 to -0.75.
_CORRECTION = 1 / 8


def corrected(body: np.ndarray, size: int, step: int, *, ratio: float, warmup: int, **_: Any) -> np.ndarray:
    """Threshold of the next step: the smallest magnitude that was sent, corrected by the number of filled slots.

    With `load` elements per slot above the threshold, a fraction of 1 - exp(-load) of the slots is filled. The target
    is a load of 1.
    """
    slots = max(1.0, ratio_at(ratio, warmup, step) * size)
    kept = int(body[:4].view(np.uint32)[0])
    if slots < _FEW_SLOTS or not _FULL[0] <= kept / slots <= _FULL[1]:
        return np.zeros(1, np.float32)
    least = float(np.abs(body[4 : 4 + 4 * kept].view(np.float32)).min())
    return np.array([least * (-math.log1p(-kept / slots)) ** _CORRECTION], np.float32)


@compressor(next_state=corrected)
def dragonn(g: Any, ratio: float = 0.001, warmup: int = 0, carry: bool = False) -> Any:
    """Hashed selection: reads the gradient once, for any ratio.

    Args:
        g: Gradient.
        ratio: Number of slots, as a fraction of the elements; about 63 % of them are filled.
        warmup: Steps in which that fraction falls to `ratio`, from 25 % on.
        carry: If true, take the threshold from the previous step when there is one.
    """
    before = previous_state() if carry else 0.0
    sizes = abs(g).sample(where(before > 0, 1, ceil(8 / ratio)) if carry else ceil(8 / ratio)).sort(descending=True)
    now = warmed(ratio, warmup)
    threshold = maximum(sizes[ceil(now * sizes.size) - 1], SMALLEST)  # zeros are not sent
    if carry:
        threshold = where(before > 0, before, threshold)
    kept = g.filter(lambda x: abs(x) >= threshold).hash(ceil(now * g.size))
    return concat(index=kept.index, value=kept.value)


@dragonn.decode
def _(p: Any) -> Any:
    return p.value.scatter(p.index)
