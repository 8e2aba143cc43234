"""DRAGONN: elements above a sampled threshold write themselves to slots that a hash gives them; who collides waits.

Biased; on average a contraction by lemma A.8 of the paper, so it needs error feedback. Payloads cannot be summed. Of
the elements above the threshold, as many as there are slots, ceil(ratio N), about 63 % find a slot of their own or come
last to a shared one. The others stay in the residual, as what is below the threshold does. Body: how many there are,
values as float32, positions in few bits; see `gradwire.lang.operators.hash` for the slots.

Source: Wang et al. 2022, algorithm 1. Differences: the hash is drawn afresh for each step, rank and tensor, so that no
element loses for ever. Empty slots are not sent, and zeros never chosen. The threshold is that of a stratified sample
of 8 / `ratio` elements, of which 8 are expected above it: its error changes how full the slots are, and no more. The
paper takes 1 % of the elements, which is too few of a small tensor and costs more than the rest for a large one. With
`carry` it is that of the step before, corrected by how many were sent, as long as slots stay between 30 and 90 % full.
"""
# Shapes: N = elements of the tensor or range, K = elements sent

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradwire.compressors.base.array import SMALLEST
from gradwire.compressors.base.decorator import compressor
from gradwire.compressors.support.warmup import ratio_at, warmed
from gradwire.lang import ceil, concat, maximum, remembered, where

_FEW_SLOTS = 256  # as many samples would do, and the count of fewer says little
_FULL = (0.3, 0.9)
# How much of a threshold's logarithm is corrected by that of the load. Magnitudes thin out with a power of 2 to 14 of
# the threshold (heavy tails, and a normal distribution's at 0.0001): the error of a step is cut to 0.75 to -0.75.
_CORRECTION = 1 / 8


def corrected(body: np.ndarray, size: int, step: int, *, ratio: float, warmup: int, **_: Any) -> float:
    """The next step's threshold: the least magnitude that was sent, and more if slots were fuller than they should be.

    A share of 1 - exp(-load) of the slots is filled by as many survivors as load says for each slot; it shall be 1.
    """
    slots = max(1.0, ratio_at(ratio, warmup, step) * size)
    kept = int(body[:4].view(np.uint32)[0])
    if slots < _FEW_SLOTS or not _FULL[0] <= kept / slots <= _FULL[1]:
        return 0.0
    least = float(np.abs(body[4 : 4 + 4 * kept].view(np.float32)).min())
    return float(least * (-math.log1p(-kept / slots)) ** _CORRECTION)


@compressor(remember=corrected)
def dragonn(g: Any, ratio: float = 0.001, warmup: int = 0, carry: bool = False) -> Any:
    """Hashed selection: one read of the gradient, whatever is kept.

    Args:
        g: the gradient.
        ratio: slots, as a fraction of the elements; about 63 % of them are filled.
        warmup: steps in which that fraction falls to `ratio`, from 25 % on.
        carry: take the threshold from the step before where there is one. Needs feedback, which keeps it.
    """
    before = remembered() if carry else 0.0
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
