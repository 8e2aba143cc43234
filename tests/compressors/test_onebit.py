"""1-bit SGD: its two means."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.core.errors import OptionError, PayloadError
from tests.contracts.compressor_cases import context, with_body


def test_each_side_of_zero_becomes_its_mean_and_zero_is_high() -> None:
    codec, grad = compressors.make("onebit"), torch.tensor([-1.0, -3.0, 4.0, 0.0, -0.0, 2.0])
    found = codec.decode(codec.encode(grad, context(grad)), context(grad))
    assert found.tolist() == [-2, -2, 1.5, 1.5, 1.5, 1.5]


def test_with_blocks_each_has_its_own_two_means() -> None:
    codec, grad = compressors.make("onebit", block=8), torch.tensor([-1.0, -3.0, 4, 0, 0, 0, 2, 3, 5, -6, -7])
    payload = codec.encode(grad, context(grad))
    means = np.array([-2, -6.5, 1.5, 5], np.float32)
    assert bytes(payload.body) == means.tobytes() + bytes([0b11111100, 0b001])
    assert codec.decode(payload, context(grad)).tolist() == [-2, -2, *[1.5] * 6, 5, -6.5, -6.5]


def test_blocks_lose_less_where_scales_differ() -> None:
    grad = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * torch.arange(4096).div(512).floor().exp2()

    def lost(block: int) -> float:
        codec = compressors.make("onebit", block=block)
        return float((codec.decode(codec.encode(grad, context(grad)), context(grad)) - grad).norm() / grad.norm())

    assert lost(512) < 0.8 * lost(0)


@pytest.mark.parametrize("block", [-1, 7])
def test_blocks_of_less_than_eight_elements_are_refused(block: int) -> None:
    with pytest.raises(OptionError, match="block must be from 8 to 1048576"):
        compressors.make("onebit", block=block)
    assert compressors.make("onebit", block=0).options == compressors.make("onebit").options


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 1])
def test_means_that_are_not_finite_are_refused(bad: float, at: int) -> None:
    codec, grad = compressors.make("onebit"), torch.ones(4)
    means = np.array([-1.0, 1.0], np.float32)
    means[at] = bad
    with pytest.raises(PayloadError, match="finite values"):
        codec.decode(with_body(codec.encode(grad, context(grad)), means.tobytes() + b"\x07"), context(grad))


@pytest.mark.parametrize("length", [0, 8, 10])
def test_other_lengths_are_refused(length: int) -> None:
    codec, grad = compressors.make("onebit"), torch.ones(4)
    with pytest.raises(PayloadError, match="Expected 9 bytes"):
        codec.decode(with_body(codec.encode(grad, context(grad)), bytes(length)), context(grad))


@pytest.mark.parametrize("size", [8 * 5000, 8 * 5000 + 3])
def test_one_element_of_the_other_side_is_exact(size) -> None:
    codec = compressors.make("onebit")
    for sign in (1.0, -1.0):
        for at in (0, 8 * 4096, size - 1):
            grad = torch.full((size,), sign).index_fill(0, torch.tensor([at]), -2 * sign)
            assert torch.equal(codec.decode(codec.encode(grad, context(grad)), context(grad)), grad)
