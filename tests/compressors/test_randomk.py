"""Random sparsification: probabilities of 16 random bits, and the bound of the list."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.compressors.randomk import probability
from gradwire.core.spec import TensorSpec
from tests.compressors.harness import body, draws, hoeffding, list_bytes, sent, traced
from tests.contracts.compressor_cases import context, normal


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.3, 0.01, 0.001, 1e-5, 1e-9])
def test_the_probability_is_what_16_random_bits_give(ratio) -> None:
    """Of all 65,536 random numbers, the right number is below p."""
    numbers = (np.arange(65536, dtype=np.float32) + np.float32(0.5)) * np.float32(2**-16)
    p = probability(ratio)
    assert np.count_nonzero(numbers < np.float32(p)) == 65536 * p >= 1
    assert abs(p - ratio) <= 2**-17 or (p == 2**-16 and ratio < p)


@pytest.mark.parametrize("ratio", [0.5, 0.01])
def test_what_is_kept_is_divided_by_the_probability(ratio) -> None:
    grad = normal(5000)
    found = sent(traced("randomk", ratio=ratio), grad)
    kept = np.flatnonzero(found)
    np.testing.assert_allclose(found[kept], grad.numpy()[kept] / probability(ratio), rtol=1e-6)
    assert abs(kept.size / 5000 - ratio) <= 5 * np.sqrt(ratio * (1 - ratio) / 5000)  # false alarm below 1e-6
    assert body(traced("randomk", ratio=ratio), grad).nbytes == list_bytes(5000, kept.size)


def test_the_mean_is_the_gradient() -> None:
    """Hoeffding's bound for all 200 elements together, with at most 2e-4 false alarms per (fixed) seed."""
    grad, num_draws = normal(200), 500
    codec = traced("randomk", ratio=0.25)
    error = np.abs(draws(codec, grad, num_draws).mean(0) - grad.numpy())
    assert (error <= hoeffding(4, num_draws) * np.abs(grad.numpy())).all()


def test_all_are_kept_at_a_ratio_of_one() -> None:
    grad = normal(3000)
    assert np.array_equal(sent(traced("randomk", ratio=1.0), grad), grad.numpy())


def test_a_payload_has_a_bound_that_is_never_met() -> None:
    codec = traced("randomk")
    most = codec.max_encoded_bytes(TensorSpec((100_000,)))
    assert most == list_bytes(100_000, int(np.ceil(2 * probability(0.01) * 100_000)) + 64)
    grad = torch.ones(100_000)
    lengths = [codec.encode(grad, context(grad, step=step)).body.nbytes for step in range(3)]
    assert len(set(lengths)) > 1
    assert max(lengths) < 0.6 * most


def test_unscaled_it_sends_elements_as_they_are_and_keeps_the_rest() -> None:
    codec, grad = traced("randomk", ratio=0.25, scaled=False), normal(4000)
    assert (codec.unbiased, codec.default_feedback, codec.variance(TensorSpec.of(grad))) == (False, "error", None)
    found, residual = sent(codec, grad), np.empty(4000, np.float32)
    kept = np.flatnonzero(found)
    assert np.array_equal(found[kept], grad.numpy()[kept])
    assert abs(kept.size - 1000) < 140
    codec.encode(grad, context(grad), residual_out=residual)
    assert np.array_equal(found + residual, grad.numpy())
