"""Whether gradients fit fp16, which has a narrow range, and no residual for what it cannot hold.

A cast to fp16 makes an infinity of what is larger than 65504. One such element makes the mean infinite, and without a
GradScaler the model is lost. Below 2^-14, digits go, and below 2^-25 the whole element. The sum of a batch's losses
makes gradients large, and a large model makes them small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

LARGEST = 65504.0
HEADROOM = 64.0
"""Ratio of fp16's largest number to the largest gradient: gradients grow in some steps."""
MAX_ERROR = 2.0**-7
"""Largest rounding error of a tensor, relative to its 2-norm. In bf16 it is 2^-9, in fp16 2^-12 from 2^-14 on."""


def misfit(gradients: Iterable[torch.Tensor], world_size: int, headroom: float = HEADROOM) -> float:
    """Return how badly gradients fit fp16; up to 1 they do.

    Args:
        gradients: Gradients of this rank. Those that are not finite do not count: a GradScaler skips their step.
        world_size: Number of ranks, by which DDP's fp16 hook divides after the cast.
        headroom: See `HEADROOM`. 1 if a GradScaler skips steps whose gradients are too large.

    Returns:
        The larger of two ratios: the largest gradient to what fp16 holds less the headroom, and the largest rounding
        error of a tensor to `MAX_ERROR`.
    """
    worst = 0.0
    for gradient in gradients:
        values = gradient.detach().float()
        largest = float(torch.linalg.vector_norm(values, math.inf))
        if not 0 < largest < math.inf:
            continue
        worst = max(worst, headroom * largest / LARGEST)
        if largest <= LARGEST:
            sent = values.half().div_(world_size).float().mul_(world_size)
            norm, error = (float(torch.linalg.vector_norm(each.double())) for each in (values, sent - values))
            worst = max(worst, error / norm / MAX_ERROR)
    return worst
