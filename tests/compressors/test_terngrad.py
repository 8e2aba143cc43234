"""TernGrad: clipping, the scaler that ranks share, and the effect of clipping on the mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.compressors.harness import draws, hoeffding, sent, traced
from tests.contracts.compressor_cases import context, heavy_tailed, normal, reduced


def limit(x: np.ndarray, clip: float) -> float:
    sigma = np.sqrt((x.astype(np.float64) ** 2).mean())
    return float(min(np.abs(x).max(), clip * sigma)) if clip else float(np.abs(x).max())


@pytest.mark.parametrize("clip", [0.0, 1.0, 2.5])
def test_values_are_zero_or_the_scaler_with_the_sign_of_the_element(clip) -> None:
    grad = heavy_tailed(500)
    found, s = sent(traced("terngrad", clip=clip), grad), np.float32(limit(grad.numpy(), clip))
    assert set(np.abs(found)) == {0, s}
    assert (found * grad.numpy() >= 0).all()


@pytest.mark.parametrize("clip", [0.0, 1.5])
def test_the_mean_is_the_clipped_gradient(clip) -> None:
    """Hoeffding's bound for all 200 elements together, with at most 2e-4 false alarms per (fixed) seed."""
    grad, num_draws = normal(200), 600
    most = limit(grad.numpy(), clip)
    error = draws(traced("terngrad", clip=clip), grad, num_draws).mean(0) - grad.numpy().clip(-most, most)
    assert np.abs(error).max() <= hoeffding(most, num_draws) + most * 2**-17


def test_it_is_declared_unbiased_only_where_nothing_is_clipped() -> None:
    assert traced("terngrad", clip=0.0).unbiased
    assert not traced("terngrad").unbiased
    assert traced("terngrad").default_feedback == "none"


def test_a_constant_is_not_clipped() -> None:
    grad = torch.full((50,), -0.3)
    assert np.array_equal(sent(traced("terngrad"), grad), grad.numpy())


def test_ranks_share_the_largest_scaler_which_does_not_travel() -> None:
    codec, grads = traced("terngrad"), [normal(300), 7 * normal(300, seed=1)]
    stats = reduced(codec, grads)
    s = np.float32(max(limit(grad.numpy(), 2.5) for grad in grads))
    assert stats[0].tolist() == [s]
    for grad in grads:
        payload = codec.encode(grad, context(grad), stats)
        assert payload.body.nbytes == 60
        assert set(codec.decode(payload, context(grad), stats=stats).abs().tolist()) == {0, s}


def test_negative_clips_are_refused() -> None:
    with pytest.raises(ValueError, match="0 <= clip < inf, but is -1"):
        traced("terngrad", clip=-1.0)
