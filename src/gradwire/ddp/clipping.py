"""What happens to gradients between their synchronization and the optimizer's step, as far as `gcomp` must know.

Its bound is for gradients that reach the optimizer as they were averaged. `clip_grad_norm_` multiplies gradients by a
factor that depends on many of them, cut ones too; so from the first factor below 1 on, of whichever tensor, `gcomp`
cuts no more than a first level of float32 and nothing of 16-bit elements: then each encode changes what goes into a
norm by 2^-17 at most. Likewise where the elements of a tensor have changed by more than one factor. The step in which
it is seen first was cut as if there were no clipping; ``gw.make("gcomp", clipped=True)`` expects it from the start. A
factor above 1 would move parameters by more than the bound: it is refused. Powers of two below 1 are a loss scale that
is taken back. `clip_grad_value_` needs nothing: it brings no two gradients further apart.

A few elements of each bucket's largest gradient are compared, on the device that they are on.
"""
# Shapes: K = elements compared of a bucket

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from gradwire.core.torch_private import in_bucket_order

NUM_COMPARED = 64
_CLOSE = 1e-5  # factors are equal up to roundings of 32-bit products; of 16-bit ones, up to two of their bits


class _Sample(NamedTuple):
    """Elements of one parameter's averaged gradient: float[K], at every `stride`-th place."""

    parameter: torch.Tensor
    stride: int
    values: torch.Tensor


class AfterAveraging:
    """Finds the factors between averaged gradients and those of the optimizer's step."""

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}

    def take(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """Remember some of an averaged gradient, as its bucket has it."""
        stride = max(1, grad.numel() // NUM_COMPARED)
        self._samples[id(parameter)] = _Sample(parameter, stride, grad.reshape(-1)[::stride].clone())

    def factors(self) -> list[float]:
        """By what each gradient was multiplied since: NaN where its elements were by several, 1.0 if it was clamped.

        Gradients that are gone tell nothing. Forgets what it has taken.
        """
        found = [_factor(sample) for sample in self._samples.values()]
        self._samples.clear()
        return [factor for factor in found if factor is not None]


def is_no_change(factor: float) -> bool:
    """Whether a factor is 1, up to roundings."""
    return abs(factor - 1) <= 2 * _CLOSE


def is_power_of_two(factor: float) -> bool:
    """Whether a factor is one that a loss scale is taken back by, up to roundings."""
    nearest: float = 2.0 ** round(math.log2(factor))
    return abs(factor - nearest) <= _CLOSE * nearest


def _factor(sample: _Sample) -> float | None:
    """See `AfterAveraging.factors`; None where there is no telling."""
    if sample.parameter.grad is None or sample.parameter.grad.is_sparse:
        return None
    now = in_bucket_order(sample.parameter.grad, sample.parameter)[:: sample.stride]
    if now.dtype == sample.values.dtype and torch.equal(now, sample.values):  # as nearly always
        return 1.0
    now, before, kind = now.double(), sample.values.double(), torch.finfo(sample.values.dtype)
    # Subnormal products have fewer bits.
    told = torch.isfinite(now) & torch.isfinite(before) & (before != 0) & (now.abs() >= kind.tiny)
    if not told.any():
        return None
    now, factors = now[told].abs(), (now / before)[told]
    highest, limit = factors.max(), now.max()
    alike = factors >= highest * (1 - 2 * max(_CLOSE, 2 * kind.eps))
    if highest <= 0 or not (alike | (now == limit)).all():
        return math.nan
    return 1.0 if (now == limit).all() and not alike.all() else float(factors[alike].median())
