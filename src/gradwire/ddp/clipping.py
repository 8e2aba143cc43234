"""Detect what changes gradients between averaging and the optimizer's step, because the bound of `gcomp` depends on it.

The bound holds for gradients that reach the optimizer as they were averaged.

- One factor below 1, as by `clip_grad_norm_`: the factor depends on many gradients, including cut ones. From the first
  such factor on, `gcomp` cuts at most 6 bits of float32, or 7 by rounding, and nothing of 16-bit elements, so that each
  encode changes what goes into a norm by at most 2^-17. The first such step was still cut as if there were no clipping;
  ``gw.make("gcomp", clipped=True)`` expects clipping from the start.
- Several factors within one tensor: treated the same way.
- A factor above 1: refused, because it would move parameters by more than the bound.
- A power of two below 1: nothing to do. A loss scale is taken back.
- Clamped values, as by `clip_grad_value_`: nothing to do. No two gradients get further apart.

A few elements of the largest gradient of each bucket are compared, on their own device.
"""
# Shapes: K = elements compared of a bucket

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from gradwire.core.torch_private import in_bucket_order

NUM_COMPARED = 64
_CLOSE = 1e-5  # relative difference of equal factors, by rounding of 32-bit products; of 16-bit ones, two bits


class _Sample(NamedTuple):
    """Every `stride`-th element of one parameter's averaged gradient: float[K]."""

    parameter: torch.Tensor
    stride: int
    values: torch.Tensor


class AfterAveraging:
    """Finds the factors between averaged gradients and the gradients of the optimizer's step."""

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}

    def begin_backward(self) -> None:
        """Forget the gradients of the pass before: this one has averaged them again, or they were thrown away."""
        self._samples.clear()

    def take(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """Remember some elements of an averaged gradient, in the order of its bucket."""
        stride = max(1, grad.numel() // NUM_COMPARED)
        self._samples[id(parameter)] = _Sample(parameter, stride, grad.reshape(-1)[::stride].clone())

    def factors(self) -> list[float]:
        """Factor by which each gradient was multiplied since `take`, which is then forgotten.

        NaN for a gradient with several factors, 1.0 for a clamped gradient. Gradients that are gone have no factor.
        """
        found = [_factor(sample) for sample in self._samples.values()]
        self._samples.clear()
        return [factor for factor in found if factor is not None]


def is_no_change(factor: float) -> bool:
    """Whether a factor is 1, up to rounding."""
    return abs(factor - 1) <= 2 * _CLOSE


def is_power_of_two(factor: float) -> bool:
    """Whether a factor is a power of two, up to rounding, as when a loss scale is taken back."""
    nearest: float = 2.0 ** round(math.log2(factor))
    return abs(factor - nearest) <= _CLOSE * nearest


def _factor(sample: _Sample) -> float | None:
    """The factor of one gradient, as in `AfterAveraging.factors`. None if it cannot be known."""
    if sample.parameter.grad is None or sample.parameter.grad.is_sparse:
        return None
    now = in_bucket_order(sample.parameter.grad, sample.parameter)[:: sample.stride]
    if now.dtype == sample.values.dtype and torch.equal(now, sample.values):  # nearly always
        return 1.0
    now, before, kind = now.double(), sample.values.double(), torch.finfo(sample.values.dtype)
    # Subnormal products have fewer bits.
    valid = torch.isfinite(now) & torch.isfinite(before) & (before != 0) & (now.abs() >= kind.tiny)
    if not valid.any():
        return None
    now, factors = now[valid].abs(), (now / before)[valid]
    highest, limit = factors.max(), now.max()
    equal = factors >= highest * (1 - 2 * max(_CLOSE, 2 * kind.eps))
    if highest <= 0 or not (equal | (now == limit)).all():
        return math.nan
    return 1.0 if (now == limit).all() and not equal.all() else float(factors[equal].median())
