"""QSGD: levels of a bucket's norm, and their variance."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.compressors.harness import body, draws, hoeffding, sent, traced
from tests.contracts.compressor_cases import normal


def norms(x: np.ndarray, block: int) -> np.ndarray:
    """The norm of each element's bucket."""
    parts = [np.full(x[s : s + block].size, np.linalg.norm(x[s : s + block])) for s in range(0, x.size, block)]
    return np.concatenate(parts)


@pytest.mark.parametrize(("bits", "block"), [(2, 16), (4, 100), (8, 512)])
def test_an_element_goes_to_one_of_the_two_levels_beside_it(bits, block) -> None:
    x, s = normal(1000).double().numpy(), 2 ** (bits - 1) - 1
    level = sent(traced("qsgd", bits=bits, block=block), normal(1000)) / norms(x, block) * s
    exact = x / norms(x, block) * s
    assert np.abs(level - np.rint(level)).max() < 1e-4
    assert (np.abs(level) >= np.floor(np.abs(exact)) - 1e-4).all()
    assert (np.abs(level) <= np.ceil(np.abs(exact)) + 1e-4).all()
    assert (level * exact >= 0).all()


def test_the_mean_is_the_gradient() -> None:
    """Hoeffding's bound for all 300 elements together, with at most 3e-4 false alarms per (fixed) seed."""
    grad, num_draws = normal(300), 400
    step = norms(grad.numpy(), 64) / 7
    error = np.abs(draws(traced("qsgd", block=64), grad, num_draws).mean(0) - grad.numpy())
    assert (error <= hoeffding(1, num_draws) * step + 2**-16 * step).all()


def test_signs_and_levels_share_a_field() -> None:
    """Axis vectors take the highest level, exactly."""
    codec, grad = traced("qsgd", block=8), torch.zeros(16)
    grad[3], grad[12] = -2.0, 5.0
    found = body(codec, grad)
    assert found[:8].view(np.float32).tolist() == [2, 5]
    # Eight bytes of planes: element 3 in the lower half of byte 3, element 12 in the upper half of byte 4.
    assert found[8:].tolist() == [0, 0, 0, 7 + 1 + 7, 7 << 4, 0, 0, 0]
    assert np.array_equal(sent(codec, grad), grad.numpy())


def test_one_bit_is_not_enough() -> None:
    with pytest.raises(ValueError, match="bits must be from 2 to 8, not 1"):
        traced("qsgd", bits=1)
