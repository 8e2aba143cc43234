"""The policies `none` and `error`: compensation, staging, and the preliminary round in between."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.core.errors import UnknownNameError
from gradwire.core.spec import ElementRange
from gradwire.residuals import EncodeInput, ResidualKey, Residuals, get
from tests.contracts.compressor_cases import context, normal

KEY = ResidualKey("fc.weight", ElementRange(0, 50))


def test_unknown_policies_list_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown feedback policy 'errors'.*Known: error, momentum, none"):
        get("errors")


def test_none_neither_reads_nor_stages() -> None:
    codec, grad, residuals = compressors.make("onebit"), normal(50), Residuals()
    residuals.add(KEY, np.full(50, 9, np.float32))
    payload = get("none").encode(EncodeInput(codec, grad, context(grad), residuals, KEY, 0.5))
    assert bytes(payload.body) == bytes(codec.encode(grad * 0.5, context(grad)).body)
    assert not residuals.is_open


def test_error_adds_the_residual_and_stages_the_rest() -> None:
    codec, grad, residuals = compressors.make("topk", ratio=0.2), normal(50), Residuals()
    residuals.add(KEY, normal(50, seed=1).numpy())
    total = grad * 0.5 + normal(50, seed=1)
    payload = get("error").encode(EncodeInput(codec, grad, context(grad), residuals, KEY, 0.5))
    sent = codec.decode(payload, context(grad))
    residuals.commit()
    np.testing.assert_array_equal(residuals.source(KEY), (total - sent).numpy())


def test_encodes_of_one_chain_build_on_each_other() -> None:
    """Two backward passes before a commit: the second compensates with what the first staged."""
    codec, policy, residuals = compressors.make("onebit"), get("error"), Residuals()
    grads, sent = [normal(50, seed=seed) for seed in (0, 1)], torch.zeros(50)
    for grad in grads:
        sent += codec.decode(policy.encode(EncodeInput(codec, grad, context(grad), residuals, KEY)), context(grad))
    residuals.commit()
    torch.testing.assert_close(sent + torch.from_numpy(residuals.source(KEY)), grads[0] + grads[1])


@pytest.mark.parametrize("stochastic", [True, False])
def test_shared_scales_are_those_of_what_is_encoded(stochastic) -> None:
    """Three ranks add integers for 20 steps: produced = applied + residuals."""
    codec, world_size, rng = (
        compressors.make("int8shared", block=8, stochastic=stochastic),
        3,
        np.random.default_rng(0),
    )
    policy, residuals = get(codec.default_feedback), [Residuals() for _ in range(world_size)]
    produced, applied = torch.zeros(50), torch.zeros(50)
    for step in range(20):
        grads = [torch.from_numpy(rng.standard_normal(50).astype(np.float32)) for _ in range(world_size)]
        own = [
            EncodeInput(codec, grad, context(grad, rank=rank, step=step), residuals[rank], KEY, 1 / world_size)
            for rank, grad in enumerate(grads)
        ]
        stats = [np.maximum.reduce([policy.stats(each)[0].values for each in own])]
        accumulator = np.zeros(50, codec.accumulator_dtype(world_size))
        for each in own:
            codec.accumulate(policy.encode(each, stats), each.ctx, accumulator)
        applied += codec.finalize(accumulator, world_size, own[0].ctx, stats, torch.empty(50))
        produced += torch.stack(grads).mean(0)
        for each in residuals:
            each.commit()
    if stochastic:  # without feedback each of 20 steps of 3 ranks is off by at most one level
        assert (applied - produced).abs().max() < 20 * 3 * 2 / 127
        assert all(each.nbytes == 0 for each in residuals)
    else:
        kept = sum(torch.from_numpy(each.source(KEY)) for each in residuals)
        torch.testing.assert_close(applied + kept, produced, rtol=0, atol=1e-5)
        assert kept.abs().max() < 3 / 127
