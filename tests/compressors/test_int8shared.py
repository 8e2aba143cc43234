"""int8shared: scales that all ranks share, and the choice of the accumulator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.compressors.base import SummableCompressor
from gradwire.core.errors import OptionError, PayloadError
from gradwire.core.spec import TensorSpec
from tests.compressors.harness import body, sent
from tests.contracts.compressor_cases import context, normal, reduced, with_body


def test_shared_scales_travel_in_no_payload_but_where_there_were_none() -> None:
    codec, grad = compressors.make("int8shared", block=64), normal(200)
    stats = reduced(codec, [grad])
    bare, whole = codec.encode(grad, context(grad), stats), codec.encode(grad, context(grad))
    assert bare.body.nbytes == 200 and whole.body.nbytes == 200 + 4 * 4
    assert torch.equal(codec.decode(bare, context(grad), stats=stats), codec.decode(whole, context(grad)))
    with pytest.raises(PayloadError, match="Expected 216 bytes, got 200"):
        codec.decode(bare, context(grad))
    with pytest.raises(ValueError, match="Pass the result of `stats`, reduced over ranks"):
        codec.decode(bare, context(grad), stats=[np.ones(3, np.float32)])


def test_lanes_are_the_sums_of_levels_and_near_the_mean() -> None:
    codec, grads = compressors.make("int8shared", block=64), [normal(500, seed=rank) for rank in range(5)]
    stats = reduced(codec, grads, 1 / 5)
    lanes, levels = np.zeros(500, np.int16), []
    for rank, grad in enumerate(grads):
        payload = codec.encode(grad, context(grad, rank=rank), stats, scale=1 / 5)
        codec.accumulate(payload, context(grad), lanes)
        levels.append(payload.body.view(np.int8).astype(int))
    assert np.array_equal(lanes, sum(levels))
    assert codec.max_contribution(5) == 127 == max(np.abs(level).max() for level in levels)
    off = codec.finalize(lanes, 5, context(grads[0]), stats, torch.empty(500)) - torch.stack(grads).mean(0)
    assert off.abs().max() <= 5 * stats[0].max() / 127


def test_lanes_are_the_narrowest_that_hold_the_sum() -> None:
    codec = compressors.make("int8shared")
    assert codec.accumulator_dtype(258) == np.int16
    assert codec.accumulator_dtype(259) == np.int32
    with pytest.raises(OptionError, match="Sum in groups of ranks"):
        codec.accumulator_dtype(2**25)


@pytest.mark.parametrize(("stochastic", "feedback"), [(True, "none"), (False, "error")])
def test_no_contraction_is_declared(stochastic: bool, feedback: str) -> None:
    codec = compressors.make("int8shared", stochastic=stochastic)
    assert isinstance(codec, SummableCompressor) and codec.needs_stats
    assert (codec.unbiased, codec.default_feedback) == (stochastic, feedback)
    assert codec.contraction(TensorSpec((100,))) is None


def test_without_a_preliminary_round_the_payload_is_that_of_int8_to_the_last_place() -> None:
    grad, options = normal(1000), {"block": 64, "stochastic": False}
    by_hand, traced = (body(compressors.make(name, **options), grad) for name in ("int8shared", "int8"))
    assert np.array_equal(by_hand[:64], traced[:64])
    assert np.abs(by_hand[64:].view(np.int8).astype(int) - traced[64:].view(np.int8)).max() <= 1


def test_the_largest_float_survives() -> None:
    largest = torch.finfo(torch.float32).max
    assert np.isfinite(sent(compressors.make("int8shared"), torch.tensor([largest, -largest, -1e38]))).all()


def test_blocks_vanish_where_a_scale_has_no_inverse() -> None:
    codec, limit = compressors.make("int8shared"), 127 * 2.0**-128
    assert not sent(codec, torch.full((64,), limit * 0.9999)).any()
    np.testing.assert_allclose(sent(codec, torch.full((64,), limit * 1.0001)), limit, rtol=1e-3)


def test_minus_128_is_refused() -> None:
    codec, grad = compressors.make("int8shared"), normal(4)
    payload = codec.encode(grad, context(grad))
    with pytest.raises(PayloadError, match="integers of at least -127"):
        codec.decode(with_body(payload, bytes(payload.body[:4]) + b"\x80" + bytes(3)), context(grad))
