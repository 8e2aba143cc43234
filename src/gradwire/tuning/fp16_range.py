"""Whether gradients fit fp16, which has a narrow range, and no residual for what it cannot hold.

A cast to fp16 makes an infinity of what is larger than 65504. One such element makes the mean infinite, and without a
GradScaler the model is lost. Below 2^-14, digits go, and below 2^-25 the whole element. The sum of a batch's losses
makes gradients large, and a large model makes them small.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

LARGEST = 65504.0
HEADROOM = 64.0
"""Ratio of fp16's largest number to the largest gradient: gradients grow in some steps."""
MAX_ERROR = 2.0**-7
"""Largest rounding error of a tensor, relative to its 2-norm. In bf16 it is 2^-9, in fp16 2^-12 from 2^-14 on."""
SAMPLED = 512
"""Least number of a tensor's elements by which its rounding error is judged."""


def misfit(gradients: Iterable[torch.Tensor], world_size: int, headroom: float = HEADROOM) -> tuple[float, bool]:
    """Return how badly gradients fit fp16, and whether all are finite. Up to 1 they fit.

    Misfit is the larger of two ratios: the largest gradient to what fp16 holds less the headroom, and the largest
    rounding error of a tensor to `MAX_ERROR`. The error is that of a sample of each tensor: rounding all of them would
    take a dozen passes over their memory.

    Args:
        gradients: Gradients of this rank, of one element type. Tensors that are not finite do not count: a GradScaler
            skips their step.
        world_size: Number of ranks, by which DDP's fp16 hook divides after the cast.
        headroom: See `HEADROOM`. 1 if a GradScaler skips steps whose gradients are too large.
    """
    flat = [gradient.detach().reshape(-1) for gradient in gradients if gradient.numel()]
    if not flat:
        return 0.0, True
    kind = torch.promote_types(flat[0].dtype, torch.float32)
    norms = torch.stack([torch.linalg.vector_norm(each, dtype=kind) for each in flat])
    bounds = torch.stack([bound for each in flat for bound in torch.aminmax(each)])  # faster than a maximum norm
    norm, bound = (each.double().cpu().numpy() for each in (norms, bounds))
    largest = np.abs(bound).reshape(-1, 2).max(axis=1)
    samples = [each[:: max(1, each.numel() // SAMPLED - 1) | 1] for each in flat]  # odd, unlike the length of most rows
    values = torch.cat(samples).float().cpu()
    errors = values.half().div_(world_size).float().mul_(world_size).sub_(values)
    sizes = np.array([each.numel() for each in samples])
    scale = np.sqrt([each.numel() for each in flat] / sizes)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error, sampled_norm = (scale * _norms(each, sizes) for each in (errors, values))
        rounding = error / np.maximum(norm, sampled_norm) / MAX_ERROR  # squares of small ones are zeros in float32
        ratios = np.maximum(headroom * largest / LARGEST, np.where(largest <= LARGEST, rounding, 0.0))
    finite = np.isfinite(largest)
    return float(ratios[finite & (largest > 0)].max(initial=0.0)), bool(finite.all())


def _norms(values: torch.Tensor, sizes: np.ndarray) -> np.ndarray:
    """2-norms of the parts of a tensor with these numbers of elements, float64[len(sizes)]."""
    squares = np.square(values.double().numpy())
    return np.sqrt(np.add.reduceat(squares, np.cumsum(sizes) - sizes))
