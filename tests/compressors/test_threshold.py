"""Threshold sparsification: the threshold is relative, and zeros are not sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.compressors.harness import body, list_bytes, sent, traced
from tests.contracts.compressor_cases import heavy_tailed


@pytest.mark.parametrize("threshold", [0.01, 0.5, 1.0])
def test_what_reaches_a_share_of_the_largest_is_kept(threshold) -> None:
    grad = heavy_tailed(3000)
    x = grad.numpy()
    found = sent(traced("threshold", threshold=threshold), grad)
    assert np.array_equal(found, np.where(np.abs(x) >= np.float32(threshold * float(np.abs(x).max())), x, 0))
    assert body(traced("threshold", threshold=threshold), grad).nbytes == list_bytes(3000, np.count_nonzero(found))


def test_zeros_are_not_sent() -> None:
    codec = traced("threshold", threshold=0.0)
    assert body(codec, torch.zeros(100)).nbytes == list_bytes(100, 0) == 4
    assert body(codec, torch.eye(10)).nbytes == list_bytes(100, 10)


def test_shares_above_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0 <= threshold <= 1, but is 1\.5"):
        traced("threshold", threshold=1.5)
