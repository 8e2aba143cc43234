"""Gradient dropping: how near the sampled quantile comes to the ratio."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.compressors.harness import body, list_bytes, sent, traced
from tests.contracts.compressor_cases import heavy_tailed, normal


@pytest.mark.parametrize("family", [normal, heavy_tailed])
def test_everything_from_some_magnitude_on_is_kept_as_it_is(family) -> None:
    grad = family(30_000)
    found = sent(traced("graddrop"), grad)
    kept = np.flatnonzero(found)
    least = np.abs(found[kept]).min()
    assert np.array_equal(found, np.where(np.abs(grad.numpy()) >= least, grad.numpy(), 0))


def test_about_as_many_are_kept_as_the_ratio_says() -> None:
    """Of 2,000 samples, 100 lie above the quantile on average, and 40 to 200 except once in a million."""
    grad = normal(20_000)
    kept = [np.count_nonzero(sent(traced("graddrop", ratio=0.05, sample=0.1), grad, step=step)) for step in range(20)]
    assert min(kept) >= 400 and max(kept) <= 2000
    assert 850 <= np.mean(kept) <= 1150
    assert len(set(kept)) > 5  # another sample each step


def test_a_payload_has_a_bound_where_magnitudes_are_equal() -> None:
    """All elements reach the quantile, and the first of them are sent, twice the ratio."""
    codec, grad = traced("graddrop", ratio=0.1), torch.ones(200)
    assert body(codec, grad).nbytes == list_bytes(200, 40)
    assert np.array_equal(sent(codec, grad), np.repeat([1.0, 0.0], [40, 160]).astype(np.float32))
