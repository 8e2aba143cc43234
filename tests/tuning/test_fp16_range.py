"""Which gradients fit fp16."""

from __future__ import annotations

import math

import pytest
import torch

from gradwire.tuning.fp16_range import HEADROOM, LARGEST, misfit


def gradient(scale: float, *others: float) -> torch.Tensor:
    """Normal gradients of this scale, and some elements more."""
    values = scale * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    return torch.cat((values, torch.tensor(others)))


@pytest.mark.parametrize(
    ("grad", "fits"),
    [
        (gradient(1e-3), True),
        (gradient(1.0), True),
        (gradient(1e-3, LARGEST / HEADROOM / 2), True),
        (gradient(1e-3, 2 * LARGEST / HEADROOM), False),
        (gradient(1e-3, 1e6), False),  # infinite in fp16
        (gradient(1e-6), False),  # a few multiples of the smallest number
        (gradient(1e-9), False),  # zeros in fp16
        (gradient(1e-30), False),  # whose squares are zeros in float32
        (gradient(1e-3).bfloat16(), True),
        (torch.zeros(10), True),
        (gradient(1e-3, math.inf), True),  # a step that a GradScaler skips says nothing
        (gradient(1e-3, math.nan), True),
    ],
)
def test_gradients_fit_if_none_is_too_large_and_rounding_changes_little(grad: torch.Tensor, fits: bool) -> None:
    assert (misfit([grad], world_size=4) <= 1) == fits
    assert misfit([gradient(1e-3), grad], world_size=4) == max(misfit([each], 4) for each in (gradient(1e-3), grad))


def test_a_scaler_allows_all_that_is_finite() -> None:
    assert misfit([gradient(1e-3, LARGEST)], world_size=4, headroom=1.0) <= 1
    assert misfit([gradient(1e-3, 2 * LARGEST)], world_size=4, headroom=1.0) == 2


def test_each_tensor_counts_by_itself() -> None:
    """Rounding errors of a small gradient are none to a large one."""
    small, large = gradient(1e-7), gradient(1.0)
    assert misfit([torch.cat((small, large))], world_size=4) < 1 < misfit([small, large], world_size=4)


def test_ddps_hook_divides_after_the_cast() -> None:
    grad = gradient(3e-6)
    assert misfit([grad], world_size=1) < misfit([grad], world_size=64) / 10
