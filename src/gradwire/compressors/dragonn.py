"""DRAGONN: elements above a sampled threshold write themselves to slots that a hash gives them; who collides waits.

Biased; on average a contraction by lemma A.8 of the paper, so it needs error feedback. Payloads cannot be summed. Of
the elements above the threshold, as many as there are slots, ceil(ratio N), about 63 % find a slot of their own or come
last to a shared one. The others stay in the residual, as what is below the threshold does. Body: how many there are,
values as float32, positions in few bits; see `gradwire.lang.operators.hash` for the slots.

Source: Wang et al. 2022, algorithm 1. Differences: the hash is drawn afresh for each step, rank and tensor, so that no
element loses for ever. Empty slots are not sent, and zeros never chosen. The threshold is that of a stratified sample
of 8 / `ratio` elements, of which 8 are expected above it: its error changes how full the slots are, and no more. The
paper takes 1 % of the elements, which is too few of a small tensor and costs more than the rest for a large one.
"""
# Shapes: N = elements of the tensor or range

from __future__ import annotations

from typing import Any

from gradwire.compressors.algorithm import compressor
from gradwire.compressors.array import SMALLEST
from gradwire.compressors.warmup import warmed
from gradwire.lang import ceil, concat, maximum


@compressor
def dragonn(g: Any, ratio: float = 0.001, warmup: int = 0) -> Any:
    """Hashed selection: one read of the gradient, whatever is kept.

    Args:
        g: the gradient.
        ratio: slots, as a fraction of the elements; about 63 % of them are filled.
        warmup: steps in which that fraction falls to `ratio`, from 25 % on.
    """
    sizes = abs(g).sample(ceil(8 / ratio)).sort(descending=True)
    now = warmed(ratio, warmup)
    threshold = maximum(sizes[ceil(now * sizes.size) - 1], SMALLEST)  # zeros are not sent
    kept = g.filter(lambda x: abs(x) >= threshold).hash(ceil(now * g.size))
    return concat(index=kept.index, value=kept.value)


@dragonn.decode
def _(p: Any) -> Any:
    return p.value.scatter(p.index)
