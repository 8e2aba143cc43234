"""mqe1bit: the squared error is minimal."""

from __future__ import annotations

import numpy as np
import torch

from tests.compressors.harness import body, sent, traced
from tests.contracts.compressor_cases import heavy_tailed


def test_each_side_of_zero_becomes_its_mean() -> None:
    grad = torch.tensor([-1.0, -3.0, 4.0, 0.0, -0.0, 2.0])
    assert sent(traced("mqe1bit"), grad).tolist() == [-2, -2, 1.5, 1.5, 1.5, 1.5]


def test_no_other_pair_of_values_has_a_smaller_squared_error() -> None:
    grad = heavy_tailed(400)
    x, found = grad.double().numpy(), sent(traced("mqe1bit"), grad).astype(np.float64)
    least = ((x - found) ** 2).sum()
    for low in (-1e-3, 0.0, 1e-3):
        for high in (-1e-3, 0.0, 1e-3):
            other = found + np.where(x < 0, low, high)
            assert ((x - other) ** 2).sum() >= least


def test_its_bytes_are_those_of_onebit() -> None:
    grad = heavy_tailed(3001)
    assert bytes(body(traced("mqe1bit"), grad)) == bytes(body(traced("onebit"), grad))
