"""AdaComp: bins, their largest magnitudes, and the elements near them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.core.spec import TensorSpec
from tests.compressors.harness import sent, traced
from tests.contracts.compressor_cases import heavy_tailed


@pytest.mark.parametrize(("block", "threshold"), [(8, 0.5), (50, 0.8), (64, 1.0), (512, 0.6)])
def test_what_comes_near_the_largest_of_its_bin_becomes_that(block, threshold) -> None:
    x = heavy_tailed(1001).numpy()
    expected = np.zeros_like(x)
    for start in range(0, x.size, block):
        part = x[start : start + block]
        largest = np.abs(part).max()
        near = np.abs(part) >= np.float32(threshold) * largest
        expected[start : start + block] = np.where(near, np.sign(part) * largest, 0)
    found = sent(traced("adacomp", block=block, threshold=threshold), torch.from_numpy(x))
    np.testing.assert_array_equal(found, expected)


def test_it_contracts_by_the_largest_of_each_bin() -> None:
    """The worst bin: only one element reaches the threshold."""
    codec, grad = traced("adacomp", block=8, threshold=1.0), torch.full((64,), 1.0)
    grad[::8] = 1.0001
    rest = ((grad.numpy() - sent(codec, grad)) ** 2).sum() / (grad.numpy() ** 2).sum()
    delta = codec.contraction(TensorSpec.of(grad))
    assert delta == 1 / 8
    assert 1 - delta - 1e-4 <= rest <= 1 - delta


def test_thresholds_that_could_enlarge_the_error_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.5 <= threshold <= 1, but is 0\.4"):
        traced("adacomp", threshold=0.4)
