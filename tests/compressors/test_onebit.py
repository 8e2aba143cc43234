"""The two means of 1-bit SGD, and the one form that each message has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.core.errors import PayloadError
from tests.contracts.compressor_cases import context, with_body


def test_each_side_of_zero_becomes_its_mean_and_zero_is_high() -> None:
    codec, grad = compressors.make("onebit"), torch.tensor([-1.0, -3.0, 4.0, 0.0, -0.0, 2.0])
    found = codec.decode(codec.encode(grad, context(grad)), context(grad))
    assert found.tolist() == [-2, -2, 1.5, 1.5, 1.5, 1.5]


@pytest.mark.parametrize(
    ("low", "high", "signs", "reason"),
    [
        (-1.0, 1.0, 0b1111, "low mean below 0, or 0 if unused"),
        (0.0, 1.0, 0b0111, "low mean below 0, or 0 if unused"),
        (-0.0, 1.0, 0b1111, "low mean below 0, or 0 if unused"),
        (1.0, 1.0, 0b0111, "low mean below 0, or 0 if unused"),
        (-1.0, 1.0, 0b0000, "high mean above 0, or 0"),
        (-1.0, -0.0, 0b0001, "high mean above 0, or 0"),
        (-1.0, -1.0, 0b0001, "high mean above 0, or 0"),
        (-1.0, 1.0, 0b10111, "padding bits of 0"),
        (-1.0, np.inf, 0b0111, "a finite number"),
    ],
)
def test_other_forms_are_refused(low, high, signs, reason) -> None:
    codec, grad = compressors.make("onebit"), torch.ones(4)
    body = np.array([low, high], np.float32).tobytes() + bytes([signs])
    with pytest.raises(PayloadError, match=reason):
        codec.decode(with_body(codec.encode(grad, context(grad)), body), context(grad))


@pytest.mark.parametrize("size", [8 * 5000, 8 * 5000 + 3])
def test_one_odd_bit_far_out_is_seen(size) -> None:
    """The decoder looks for the side that is in use no further than it must, but that far."""
    codec = compressors.make("onebit")
    for sign in (1.0, -1.0):
        for at in (0, 8 * 4096, size - 1):
            grad = torch.full((size,), sign).index_fill(0, torch.tensor([at]), -2 * sign)
            assert torch.equal(codec.decode(codec.encode(grad, context(grad)), context(grad)), grad)
