"""signSGD: its scale, and the majority vote when aggregates are re-encoded."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.core.spec import TensorSpec
from tests.compressors.harness import sent, traced
from tests.contracts.compressor_cases import context, heavy_tailed


def test_all_elements_have_the_mean_magnitude_and_zero_is_positive() -> None:
    assert sent(traced("signsgd"), torch.tensor([-1.0, 3.0, 0.0, -0.0])).tolist() == [-1, 1, 1, 1]


def test_the_error_is_that_of_karimireddy() -> None:
    """‖x‖² - ‖x‖₁²/N, their lemma 8."""
    x = heavy_tailed(600)
    rest = float(((x.numpy() - sent(traced("signsgd"), x)).astype(np.float64) ** 2).sum())
    l1, l2 = float(x.double().abs().sum()), float((x.double() ** 2).sum())
    np.testing.assert_allclose(rest, l2 - l1**2 / 600, rtol=1e-5)
    assert rest <= (1 - traced("signsgd").contraction(TensorSpec((600,)))) * l2


def test_an_aggregate_that_is_encoded_anew_has_the_signs_of_the_majority() -> None:
    """For an odd number of ranks with the same mean magnitude."""
    codec, rng = traced("signsgd"), np.random.default_rng(0)
    grads = [torch.from_numpy(rng.choice([-1.0, 1.0], 200).astype(np.float32)) for _ in range(5)]
    ctxs = [context(grad, rank=rank) for rank, grad in enumerate(grads)]
    total = codec.decode_sum([codec.encode(g, c) for g, c in zip(grads, ctxs, strict=True)], ctxs, torch.empty(200))
    assert np.array_equal(np.sign(sent(codec, total)), np.sign(sum(grad.numpy() for grad in grads)))
