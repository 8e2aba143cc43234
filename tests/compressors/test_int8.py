"""int8: scales of blocks, their limits, and both roundings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.core.spec import TensorSpec
from tests.compressors.harness import body, draws, hoeffding, sent, traced
from tests.contracts.compressor_cases import heavy_tailed, normal

MAX, TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).smallest_subnormal)


def test_each_block_has_the_scale_of_its_largest() -> None:
    grad = torch.cat([torch.linspace(-1, 1, 8), torch.linspace(-100, 0, 5)])
    found = body(traced("int8", block=8, stochastic=False), grad)
    scales, q = found[:8].view(np.float32), found[8:].view(np.int8)
    np.testing.assert_array_equal(scales, np.array([1, 100], np.float32) / np.float32(127))
    assert q[0] == -127 and q[7] == 127 and q[8] == -127 and q[12] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_to_nearest_an_element_is_half_a_step_off_at_most(dtype: torch.dtype) -> None:
    grad = heavy_tailed(1000).clamp(-1e4, 1e4).to(dtype)
    blocks = np.pad(grad.float().numpy(), (0, 24)).reshape(16, 64)
    found = body(traced("int8", block=64, stochastic=False), grad)
    scales, q = found[:64].view(np.float32), found[64:].view(np.int8)
    decoded = np.repeat(scales, 64)[:1000] * q
    half = np.repeat(np.abs(blocks).max(1) / 254, 64)[:1000]
    assert (np.abs(decoded - grad.float().numpy()) <= half * (1 + 2**-15)).all()


def test_the_options_decide_on_feedback_and_algebra() -> None:
    spec, at_random, to_nearest = TensorSpec((100,)), traced("int8"), traced("int8", block=64, stochastic=False)
    assert at_random.unbiased and not to_nearest.unbiased
    assert (at_random.default_feedback, to_nearest.default_feedback) == ("none", "error")
    assert at_random.contraction(spec) is None
    assert to_nearest.contraction(spec) == 1 / (1 + 63 / 254**2)


def test_the_mean_is_the_gradient() -> None:
    """Hoeffding's bound for all 300 elements together, with at most 3e-4 false alarms per (fixed) seed."""
    grad, num_draws = normal(300), 400
    step = float(grad.abs().max()) / 127
    error = np.abs(draws(traced("int8"), grad, num_draws).mean(0) - grad.numpy())
    assert (error <= (hoeffding(1, num_draws) + 2**-16) * step).all()


@pytest.mark.parametrize("stochastic", [True, False])
def test_the_largest_float_survives(stochastic: bool) -> None:
    found = sent(traced("int8", stochastic=stochastic), torch.tensor([MAX, -MAX, -1e38]))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, [MAX, -MAX, -1e38], rtol=0, atol=MAX / 127)


@pytest.mark.parametrize("stochastic", [True, False])
def test_a_block_whose_scale_underflows_is_lost_and_no_other(stochastic: bool) -> None:
    grad = torch.zeros(24)
    grad[3], grad[11], grad[20] = 63 * TINY, 64 * TINY, -2.0
    found = sent(traced("int8", block=8, stochastic=stochastic), grad)
    assert not found[:8].any()
    assert np.array_equal(found[8:], grad[8:].numpy())
