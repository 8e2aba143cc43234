"""Natural compression: powers of two."""

from __future__ import annotations

import numpy as np
import torch

from tests.compressors.harness import body, draws, hoeffding, sent, traced
from tests.contracts.compressor_cases import heavy_tailed, normal


def test_an_element_becomes_one_of_the_two_powers_beside_it() -> None:
    x = heavy_tailed(2000).numpy()
    found = sent(traced("natural"), torch.from_numpy(x))
    assert (found[x == 0] == 0).all()
    x, found = x[x != 0], found[x != 0]
    below = 2.0 ** np.floor(np.log2(np.abs(x.astype(np.float64))))
    assert ((np.abs(found) == below) | (np.abs(found) == 2 * below)).all()
    assert (np.sign(found) == np.sign(x)).all()


def test_powers_of_two_are_exact_and_take_nine_bits() -> None:
    grad = torch.tensor([1.0, -2.0, 0.5, -(2.0**-126), 2.0**127, 0.0, -0.25, 1024.0])
    codec = traced("natural")
    assert np.array_equal(sent(codec, grad), grad.numpy())
    assert body(codec, grad).tolist() == [127, 128, 126, 1, 254, 0, 125, 137, 0b01001010]


def test_the_mean_is_the_gradient() -> None:
    """Hoeffding's bound for all 300 elements together, with at most 3e-4 false alarms per (fixed) seed."""
    grad, num_draws = normal(300), 500
    error = np.abs(draws(traced("natural"), grad, num_draws).mean(0) - grad.numpy())
    below = 2.0 ** np.floor(np.log2(np.abs(grad.double().numpy())))
    assert (error <= hoeffding(1, num_draws) * below + 2**-16 * below).all()


def test_subnormals_vanish_and_the_largest_stay_finite() -> None:
    most = float(np.finfo(np.float32).max)
    found = sent(traced("natural"), torch.tensor([1e-40, -1e-38, most, -most]))
    assert found.tolist() == [0, 0, most, -most]
