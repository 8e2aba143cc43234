"""Which gradients fit fp16."""

from __future__ import annotations

import math

import pytest
import torch

from gradwire.tuning.fp16_range import HEADROOM, LARGEST, MAX_ERROR, misfit


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
    assert (misfit([grad], world_size=4)[0] <= 1) == fits
    both = gradient(1e-3).to(grad.dtype), grad
    assert misfit(both, world_size=4) == (max(misfit([each], 4)[0] for each in both), bool(grad.isfinite().all()))


def test_a_scaler_allows_all_that_is_finite() -> None:
    assert misfit([gradient(1e-3, LARGEST)], world_size=4, headroom=1.0)[0] <= 1
    assert misfit([gradient(1e-3, 2 * LARGEST)], world_size=4, headroom=1.0)[0] == 2


def test_each_tensor_counts_by_itself() -> None:
    """Rounding errors of a small gradient are none to a large one."""
    small, large = gradient(1e-7), gradient(1.0)
    assert misfit([torch.cat((small, large))], world_size=4)[0] < 1 < misfit([small, large], world_size=4)[0]


def test_ddps_hook_divides_after_the_cast() -> None:
    grad = gradient(3e-6)
    assert misfit([grad], world_size=1)[0] < misfit([grad], world_size=64)[0] / 10


@pytest.mark.parametrize("size", [1, 511, 4096, 300_000])
def test_a_sample_judges_the_rounding_of_a_tensor(size: int) -> None:
    """Also where few elements have most of the norm, and rounding takes the others."""
    generator = torch.Generator().manual_seed(size)
    values = 1e-6 * torch.randn(size, generator=generator)
    for large in (0.0, 1e-4):
        values[: size // 100] += large
        sent = values.half().div(4).float() * 4
        expected = float((sent - values).norm() / values.norm()) / MAX_ERROR
        assert misfit([values.reshape(1, -1)], world_size=4)[0] == pytest.approx(expected, rel=0.2)


def test_what_has_no_elements_fits() -> None:
    assert misfit([], world_size=4) == (0.0, True)
    assert misfit([torch.empty(0), torch.zeros(3)], world_size=4) == (0.0, True)
