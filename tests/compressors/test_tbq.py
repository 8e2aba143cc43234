"""Threshold binary quantization: its threshold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.core.errors import OptionError
from tests.contracts.compressor_cases import context, heavy_tailed


def quantized(x: np.ndarray, threshold: float) -> np.ndarray:
    """The published formula, element by element."""
    tau = np.float32(min(threshold * np.abs(x.astype(np.float64)).mean(), np.abs(x).max()))
    return np.array([tau if v >= tau else -tau if v <= -tau else 0 for v in x], np.float32)


@pytest.mark.parametrize("threshold", [0.5, 1.0, 2.0, 1e6])
def test_what_reaches_tau_becomes_tau_and_the_rest_waits(threshold) -> None:
    codec, grad = compressors.make("tbq", threshold=threshold), heavy_tailed(300)
    residual = np.empty(300, np.float32)
    found = codec.decode(codec.encode(grad, context(grad), residual_out=residual), context(grad)).numpy()
    np.testing.assert_array_equal(found, quantized(grad.numpy(), threshold))
    np.testing.assert_array_equal(residual, grad.numpy() - found)
    assert found.any()


def test_the_largest_is_sent_however_high_the_threshold() -> None:
    """Otherwise a constant gradient would never be sent, because its mean grows with its residual."""
    codec, grad = compressors.make("tbq", threshold=5.0), torch.full((40,), 0.3)
    assert torch.equal(codec.decode(codec.encode(grad, context(grad)), context(grad)), grad)


def test_negative_thresholds_are_refused() -> None:
    with pytest.raises(ValueError, match="0 <= threshold < inf, but is -1"):
        compressors.make("tbq", threshold=-1.0)


def test_a_threshold_of_0_would_send_only_zeros_and_is_refused() -> None:
    with pytest.raises(OptionError, match="0 < threshold < inf, but is 0"):
        compressors.make("tbq:threshold=0")
