"""Residuals: exact, in place, scaled, and without loss over many steps."""
# Shapes: N = elements of the tensor, W = ranks

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from gradwire.compressors.base import Compressor
from gradwire.core.spec import ELEMENT_TYPES, ElementRange, TensorSpec, as_array
from gradwire.residuals import EncodeInput, ResidualKey, Residuals, get
from gradwire.testing.cases import (
    EDGE_TENSORS,
    EPSILON,
    bits,
    context,
    float32_context,
    heavy_tailed,
    is_cast,
    keeps_float32,
    normal,
)
from gradwire.testing.checks import about, check, expect


@check()
def gradient_is_what_was_sent_plus_the_residual(codec: Compressor) -> None:
    """The gradient is decode(encode(g)) + residual, up to float32 rounding, for edge-case tensors."""
    for name, make in EDGE_TENSORS.items():
        with about(name):
            _gradient_is_sent_plus_residual(codec, make())


def _gradient_is_sent_plus_residual(codec: Compressor, grad: torch.Tensor) -> None:
    residual = np.full(grad.numel(), np.nan, np.float32)
    payload = codec.encode(grad, context(grad), residual_out=residual)
    if payload.nonfinite:
        expect(is_cast(codec), "a finite gradient was marked as not finite")
        return
    sent = as_array(codec.decode(payload, context(grad), out=torch.empty(grad.shape))).astype(np.float64)
    x = as_array(grad.float()).astype(np.float64)
    slack = np.zeros(x.shape) if keeps_float32(codec) else EPSILON * (np.abs(x) + np.abs(sent))
    if codec.exact:
        x = sent  # a float64 gradient has no float32 residual
    off = np.abs(x - sent - residual) - slack
    expect(not (~(off <= 0)).any(), f"{int((~(off <= 0)).sum())} of {off.size} elements are not sent + residual")


@check()
def the_residual_may_be_the_memory_of_the_gradient(codec: Compressor) -> None:
    """If residual_out is the memory of g, payload and residual are the same."""
    grad = heavy_tailed(777)
    residual = np.empty(777, np.float32)
    payload = codec.encode(grad, context(grad), residual_out=residual)
    memory = grad.clone()
    in_place = codec.encode(memory, context(grad), residual_out=as_array(memory))
    expect(bytes(payload.body) == bytes(in_place.body), "the payload differs if the residual overwrites the gradient")
    expect(bits(memory) == residual.tobytes(), "the residual differs if it overwrites the gradient")


@check()
def compensated_encode_is_compensate_then_encode(codec: Compressor) -> None:
    """encode(g, scale, residual_in) equals encode(scale · g + residual_in), also in place."""
    for dtype in ELEMENT_TYPES:
        with about(dtype):
            _compensated(codec, heavy_tailed(900).clamp(-6e4, 6e4).to(dtype))


def _compensated(codec: Compressor, grad: torch.Tensor) -> None:
    before, ctx = as_array(normal(900, seed=1)), float32_context(grad)
    total = torch.from_numpy(np.float32(0.25) * as_array(grad.float()) + before)
    residual = np.empty(900, np.float32)
    expected = codec.encode(total, ctx, residual_out=residual)
    own = before.copy()
    for work, source in ((np.empty(900, np.float32), before), (own, own)):
        payload = codec.encode(grad, ctx, scale=0.25, residual_in=source, residual_out=work)
        expect(bytes(payload.body) == bytes(expected.body), "other bytes than encode of the compensated gradient")
        expect(work.tobytes() == residual.tobytes(), "another residual than encode of the compensated gradient")


@check()
def without_feedback_the_scale_goes_into_the_payload(codec: Compressor) -> None:
    """encode(g, scale) equals encode(scale · g) for a power of two, which rounds nothing."""
    for dtype in ELEMENT_TYPES:
        grad = heavy_tailed(900).clamp(-6e4, 6e4).to(dtype)
        ctx = float32_context(grad)
        payload = codec.encode(grad, ctx, scale=0.25)
        expected = codec.encode(grad.float() * 0.25, ctx)
        expect(bytes(payload.body) == bytes(expected.body), f"{dtype}: other bytes than encode of the scaled gradient")


@check()
def scaling_without_feedback_makes_valid_payloads_even_by_underflow(codec: Compressor) -> None:
    """A payload of scale · g decodes, and is marked as non-finite only if it is."""
    for name, make in EDGE_TENSORS.items():
        for scale in (1 / 3, 1e-30):
            with about(f"{name}, scale {scale:.3g}"):
                grad = make()
                payload = codec.encode(grad, context(grad), scale=scale)
                sent = codec.decode(payload, context(grad))
                expect(payload.nonfinite == bool(sent.isnan().any()), "the mark and the values disagree")
                expect(payload.nonfinite <= is_cast(codec), "a finite gradient was marked as not finite")


@check(lambda codec: codec.default_feedback == "error")
def scatter_reduce_of_three_ranks_loses_nothing_in_300_steps(codec: Compressor) -> None:
    """Produced = applied + residuals of both roles, element by element, with every fifth step rolled back."""
    world_size, size = 3, 210
    ranges = [ElementRange(70 * rank, 70) for rank in range(world_size)]
    residuals = [Residuals() for _ in range(world_size)]
    produced, applied = np.zeros(size), np.zeros(size)
    rng = np.random.default_rng(5)
    offsets = rng.standard_normal((world_size, size)).astype(np.float32)  # ranks see different data
    for step in range(300):
        grads = [offset + rng.standard_normal(size).astype(np.float32) for offset in offsets]
        update = _scatter_reduced(codec, step, grads, ranges, residuals)
        for each in residuals:
            each.rollback() if step % 5 == 4 else each.commit()
        if step % 5 != 4:
            produced += np.mean(grads, axis=0, dtype=np.float64)
            applied += update.numpy()
    kept = np.sum([each.total()["w"] for each in residuals], axis=0)
    off = float(np.abs(applied + kept - produced).max())
    expect(off <= 2e-3, f"applied + residuals differ from what was produced by up to {off:.4g}")
    # Without a residual for the re-encoded aggregate, most of the gradient would be missing.
    delta = codec.contraction(TensorSpec((70,)))
    if delta is None or delta > 0.1 / 70:
        ratio = float(np.abs(kept).mean() / np.abs(produced).mean())
        expect(ratio < 0.25, f"after 300 steps, {100 * ratio:.0f} % of the gradient is still in residuals")


def _scatter_reduced(
    codec: Compressor, step: int, grads: list[np.ndarray], ranges: list[ElementRange], residuals: list[Residuals]
) -> torch.Tensor:
    """One step: each owner gets its range from all ranks, and re-encodes the sum."""
    policy, ranks = get("error"), range(len(grads))
    update = torch.empty(grads[0].size)
    for owner, owned in enumerate(ranges):
        spec = TensorSpec((owned.count,))
        ctxs = [context(torch.empty(0), spec=spec, step=step, rank=rank, offset=owned.offset) for rank in ranks]
        slices = [torch.from_numpy(grad[owned.offset : owned.end]) for grad in grads]
        key = ResidualKey("w", owned)
        payloads = [
            policy.encode(EncodeInput(codec, slices[rank], ctxs[rank], residuals[rank], key, 1 / len(grads)))
            for rank in ranks
        ]
        total = codec.decode_sum(payloads, ctxs, torch.empty(owned.count))
        ctx = replace(ctxs[owner], stage=1)
        key = ResidualKey("w", owned, "aggregate")
        again = policy.encode(EncodeInput(codec, total, ctx, residuals[owner], key))
        codec.decode(again, ctx, out=update[owned.offset : owned.end])
    return update
