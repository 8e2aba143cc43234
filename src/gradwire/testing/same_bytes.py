"""Determinism: the same bytes at every call, on every backend, for every stride."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.compressors.base import Compressor
from gradwire.testing.cases import (
    BACKENDS,
    EDGE_TENSORS,
    backend,
    bits,
    context,
    heavy_tailed,
    normal,
    rounds_at_random,
)
from gradwire.testing.checks import about, check, expect


@check()
def same_bytes_twice_and_on_every_backend(codec: Compressor) -> None:
    """Payload, residual and decoded tensor of edge-case tensors are the same at each call and on all backends."""
    for name, make in EDGE_TENSORS.items():
        with about(name):
            grad = make()
            first, *others = [_all_that_comes_out(codec, grad, each) for each in (*BACKENDS, *BACKENDS)]
            for other in others:
                for what, one, two in zip(("the mark", "the payload", "the residual", "the tensor"), first, other):
                    expect(one == two, f"{what} differs from call to call or from backend to backend")


def _all_that_comes_out(codec: Compressor, grad: torch.Tensor, name: str) -> tuple[bool, bytes, bytes, bytes]:
    with backend(name):
        residual = np.zeros(grad.numel(), np.float32)
        payload = codec.encode(grad, context(grad), residual_out=residual)
        if payload.nonfinite:
            residual.fill(0)  # undefined
        decoded = codec.decode(payload, context(grad))
        return payload.nonfinite, bytes(payload.body), residual.tobytes(), bits(decoded)


@check()
def strides_do_not_matter(codec: Compressor) -> None:
    """A strided view gives the same bytes as its contiguous copy."""
    wide = normal(60 * 40).reshape(60, 40)
    for name, view in (("transposed", wide.T), ("steps", wide[::2, 1::3]), ("a column", wide[:, 5])):
        found, expected = codec.encode(view, context(view)), codec.encode(view.contiguous(), context(view))
        expect(bytes(found.body) == bytes(expected.body), f"{name}: other bytes than for the contiguous copy")


@check()
def randomness_depends_on_the_context_alone(codec: Compressor) -> None:
    """With random rounding, another step, rank, seed, stage or name gives other bytes."""
    if not rounds_at_random(codec):
        return
    grad = normal(600)
    body = bytes(codec.encode(grad, context(grad)).body)
    for field, value in {"step": 4, "rank": 1, "seed": 8, "stage": 1, "name": "fc.bias"}.items():
        other = bytes(codec.encode(grad, context(grad, **{field: value})).body)
        expect(other != body, f"another {field} gave the same bytes, so that rounding errors do not average out")


@check()
def decode_sum_is_decoding_one_after_the_other(codec: Compressor) -> None:
    """decode_sum of five payloads gives the same bits as decoding them one by one; of none, it gives zeros."""
    for name, largest in (("cpu", 70_000), ("reference", 3000)):
        for size in (0, 1, 9, 2500, largest):
            with about(f"{size} elements on {name}"), backend(name):
                _decode_sum(codec, size)
    expect(not codec.decode_sum([], [], torch.ones(4)).any(), "the sum of no payloads is not zero")


def _decode_sum(codec: Compressor, size: int) -> None:
    grads = [heavy_tailed(size, seed=rank) * 3**rank for rank in range(5)]
    ctxs = [context(grad, rank=rank) for rank, grad in enumerate(grads)]
    payloads = [codec.encode(grad, ctx) for grad, ctx in zip(grads, ctxs, strict=True)]
    one_by_one = torch.zeros(size)
    for payload, ctx in zip(payloads, ctxs, strict=True):
        codec.decode(payload, ctx, out=one_by_one, accumulate=True)
    at_once = codec.decode_sum(payloads, ctxs, torch.full((size,), torch.nan))
    expect(bits(at_once) == bits(one_by_one), "decode_sum differs from decoding with accumulate=True, one by one")
