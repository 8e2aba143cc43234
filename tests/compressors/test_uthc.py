"""Uniform THC: shared ends, no bias, and the benefit of rotation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.core.errors import OptionError, PayloadError
from gradwire.core.spec import TensorSpec
from tests.compressors.harness import draws, sent
from tests.contracts.compressor_cases import context, heavy_tailed, normal, reduced, with_body


def test_without_rotation_it_is_algorithm_1() -> None:
    """Levels of all ranks lie between the smallest and the largest element. Line 9 decodes their sum."""
    codec = compressors.make("uthc", bits=3, rotate="none", block=1 << 20)
    grads = [normal(500, seed=rank) + rank for rank in range(4)]
    stats = reduced(codec, grads)
    m, M = float(min(grad.min() for grad in grads)), float(max(grad.max() for grad in grads))
    np.testing.assert_allclose([stats[0][0], stats[1][0]], [m / 2**20, M / 2**20])
    lanes, ctxs = np.zeros(501, np.uint8), [context(grad, rank=rank) for rank, grad in enumerate(grads)]
    for grad, ctx in zip(grads, ctxs, strict=True):
        codec.accumulate(codec.encode(grad, ctx, stats), ctx, lanes)
    mean = codec.finalize(lanes, 4, ctxs[0], stats, torch.empty(500)).numpy() / 4
    np.testing.assert_allclose(mean, m + lanes[:-1] / 4 * (M - m) / 7, atol=1e-5)


@pytest.mark.parametrize("rotate", ["block", "full", "none"])
def test_it_is_unbiased_for_one_rotation_as_well(rotate: str) -> None:
    grad, codec = heavy_tailed(320), compressors.make("uthc", rotate=rotate, block=64)
    decoded = np.stack([sent(codec, grad, rank=rank) for rank in range(300)]).astype(np.float64)
    low, high = (values * 2.0**20 for values in reduced(codec, [grad]))
    # Elements are sums of coordinates, each between two levels, over the root of their number, where rotated.
    bound = (high - low).max() / 15 * math.sqrt(math.log(2 * 320 / 1e-6) / 600)
    assert np.abs(decoded.mean(0) - grad.numpy()).max() < bound


def test_rotation_makes_the_range_and_the_error_smaller() -> None:
    grad = heavy_tailed(1 << 14)
    errors = {
        rotate: float(((draws(compressors.make("uthc", rotate=rotate), grad, 4) - grad.numpy()) ** 2).mean())
        for rotate in ("block", "none")
    }
    assert errors["block"] < errors["none"] / 3


@pytest.mark.parametrize("rotate", ["block", "none"])
@pytest.mark.parametrize("size", [1e-28, 1e-31, 1e-38, 1e-43])
def test_tiny_blocks_decode_to_nothing_that_is_larger(rotate: str, size: float) -> None:
    grad = normal(1024) * size
    found = np.abs(sent(compressors.make("uthc", rotate=rotate), grad)).max()
    assert found <= 2 * float(grad.abs().max()) and (found == 0) == (size < 1e-30)


def test_a_constant_is_sent_exactly_without_rotation() -> None:
    codec, grad = compressors.make("uthc", rotate="none"), torch.full((3000,), 0.1)
    assert torch.equal(codec.decode(codec.encode(grad, context(grad)), context(grad)), grad)


@pytest.mark.parametrize("ends", [(1.0, -1.0), (np.nan, 1.0), (-np.inf, 1.0), (0.0, np.inf)])
def test_ends_that_no_encoder_sends_are_refused(ends) -> None:
    codec, grad = compressors.make("uthc"), normal(40)
    payload = codec.encode(grad, context(grad))
    body = np.float32(ends).tobytes() + bytes(payload.body[8:])
    with pytest.raises(PayloadError, match="scales of blocks"):
        codec.decode(with_body(payload, body), context(grad))


def test_lanes_follow_from_the_bits() -> None:
    codec = compressors.make("uthc", bits=4)
    assert codec.accumulator_dtype(17) == np.uint8 and codec.accumulator_dtype(18) == np.uint16
    with pytest.raises(OptionError, match="accumulator_bits=16"):
        compressors.make("uthc", bits=4, accumulator_bits=8).accumulator_dtype(18)


def test_ends_and_mark_of_what_is_not_finite() -> None:
    codec, grad = compressors.make("uthc"), normal(2000)
    grad[1500] = torch.nan
    low, high = codec.stats(grad, context(grad))
    assert (low.reduction, high.reduction) == ("min", "max")
    assert np.isneginf(low.values).all() and np.isposinf(high.values).all()
    assert codec.max_encoded_bytes(TensorSpec((2000,))) == 2 * 2 * 4 + 512 + 512
