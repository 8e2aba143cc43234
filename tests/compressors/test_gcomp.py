"""GCOMP: the bits that it cuts, and that the rest has one encoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gradwire.compressors as compressors
from gradwire.compressors.support.gcomp_metric import Numbers
from gradwire.core.context import Context
from tests.contracts.compressor_cases import bits, context, heavy_tailed, normal

RATE = 2.0**-8


def aux(parameter: torch.Tensor, loss_scale: float = 1.0, **numbers: float) -> dict[str, Any]:
    """Auxiliary entries of plain SGD."""
    found = Numbers(**({"direct": RATE} | numbers))
    return {
        "parameter": parameter,
        "numbers": torch.tensor(found, dtype=torch.float32),
        "loss_scale": torch.tensor(loss_scale),
    }


def decoded(grad: torch.Tensor, ctx: Context) -> torch.Tensor:
    codec = compressors.make("gcomp")
    return codec.decode(codec.encode(grad, ctx), ctx)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_without_an_optimizer_in_the_context_nothing_is_cut_off(dtype) -> None:
    grad = heavy_tailed(3000).to(dtype)
    assert bits(decoded(grad, context(grad))) == bits(grad)


@pytest.mark.parametrize(("ratio", "kept"), [(0, 23), (6, 17), (12, 11), (18, 5), (25, 5)])
def test_levels_follow_the_ratio_of_parameter_and_step(ratio, kept) -> None:
    """Mantissa bits that are left if the parameter is this many binary orders above the steps of 4 ranks."""
    grad = normal(4000).abs() + 1  # 1 to 6
    parameter = torch.full((4000,), 2.0**ratio * RATE * 4 * 8)
    found = decoded(grad, context(grad, aux=aux(parameter)))
    low = found.view(torch.int32) & (1 << 23 - kept) - 1
    assert not low.any()
    assert (found.view(torch.int32) & (1 << 23 - kept + 2) - 1).any()
    assert ((grad - found) >= 0).all()
    assert ((grad - found) <= grad * 2.0**-kept).all()


def test_levels_that_are_derived_and_levels_that_are_sent_may_give_the_same_tensor() -> None:
    codec, grad = compressors.make("gcomp"), normal(4000)
    derived = context(grad, aux=aux(normal(4000, seed=1)) | {"common": torch.tensor(True)})
    payload = codec.encode(grad, derived)
    found = codec.decode(payload, derived)
    again = codec.encode(found, context(found))
    assert bits(codec.decode(again, derived)) == bits(found)
    assert bytes(again.body) != bytes(payload.body) and not codec.unique_encoding


def test_more_ranks_and_a_smaller_loss_scale_cut_less() -> None:
    grad, parameter = normal(4000), normal(4000, seed=1)

    def error(world_size: int, loss_scale: float) -> float:
        ctx = context(grad, world_size=world_size, aux=aux(parameter, loss_scale))
        return float((decoded(grad, ctx) - grad).abs().sum())

    assert error(1, 1) > error(16, 1) > error(1024, 1) > 0
    assert error(4, 1024) > error(4, 1)
    assert error(4, 1024) == error(2, 512)


def test_the_payload_of_what_was_cut_is_that_of_lossless() -> None:
    grad, parameter = heavy_tailed(20_000) * 1e-3, normal(20_000, seed=1)
    cutting = context(grad, aux=aux(parameter))
    payload = compressors.make("gcomp").encode(grad, cutting)
    left = decoded(grad, cutting)
    assert not torch.equal(left, grad)
    assert bytes(payload.body) == bytes(compressors.make("lossless").encode(left, context(left)).body)
    assert payload.body.nbytes < 0.75 * compressors.make("lossless").encode(grad, context(grad)).body.nbytes


def test_it_takes_what_it_has_cut_for_what_it_is() -> None:
    grad, parameter = normal(3000), normal(3000, seed=1)
    ctx = context(grad, aux=aux(parameter))
    left = decoded(grad, ctx)
    assert bits(decoded(left, ctx)) == bits(left)


def test_with_a_residual_nothing_is_lost() -> None:
    codec, grad, parameter = compressors.make("gcomp"), normal(3000), normal(3000, seed=1)
    residual = np.empty(3000, np.float32)
    ctx = context(grad, aux=aux(parameter))
    sent = codec.decode(codec.encode(grad, ctx, residual_out=residual), ctx)
    assert residual.any()
    assert torch.equal(sent + torch.from_numpy(residual), grad)


def test_a_gradient_of_a_loss_that_is_scaled_for_the_mean_is_cut_alike() -> None:
    codec, grad, parameter = compressors.make("gcomp"), normal(3000), normal(3000, seed=1)
    ctx = context(grad, aux=aux(parameter))
    one = codec.encode(grad, ctx, scale=0.25)
    two = codec.encode(grad * 0.25, ctx)
    assert bytes(one.body) == bytes(two.body)
    assert codec.encode(grad.index_fill(0, torch.tensor([5]), torch.inf), ctx, scale=0.25).nonfinite
