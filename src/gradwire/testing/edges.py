"""Edge-case tensors, gradients that are not finite, and the `out` argument of decoders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from gradwire.compressors.base import Compressor
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec
from gradwire.testing.cases import EDGE_TENSORS, EPSILON, NONFINITE_TENSORS, bits, context, is_cast, normal
from gradwire.testing.checks import about, check, expect, refusal


@check()
def edge_tensors_decode_to_something_finite_and_near(codec: Compressor) -> None:
    """Finite tensors decode to finite values of at most twice the largest magnitude, or as `variance` allows."""
    for name, make in EDGE_TENSORS.items():
        with about(name):
            _edge(codec, name, make())


def _edge(codec: Compressor, name: str, grad: torch.Tensor) -> None:
    payload = codec.encode(grad, context(grad))
    found = codec.decode(payload, context(grad))
    expect(found.shape == grad.shape, f"expected shape {tuple(grad.shape)}, got {tuple(found.shape)}")
    if payload.nonfinite:
        expect(is_cast(codec) and name in ("largest", "wide range"), "a finite gradient was marked as not finite")
        return
    expect(found.isfinite().all(), "a finite gradient decodes to values that are not finite")
    largest = float(grad.abs().max()) if grad.numel() else 0.0
    most = max(2.0, (1 + (codec.variance(TensorSpec.of(grad)) or 0)) * (1 + EPSILON)) * largest
    expect(
        (found.double().abs() <= most).all(),
        f"elements of at most {largest:.4g} decode to {float(found.double().abs().max()) if found.numel() else 0:.4g}. "
        "If that is intended, declare `variance`.",
    )
    if not largest:
        expect(not found.any(), "zeros decode to something else")


@check()
def a_non_finite_gradient_marks_the_payload(codec: Compressor) -> None:
    """With NaN or infinity anywhere, the payload is marked and empty, and decodes to NaN; or to itself, if `exact`."""
    for name, make in NONFINITE_TENSORS.items():
        with about(name):
            _nonfinite(codec, make())


def _nonfinite(codec: Compressor, grad: torch.Tensor) -> None:
    work = np.zeros(grad.numel(), np.float32)
    for payload in (
        codec.encode(grad, context(grad)),
        codec.encode(grad, context(grad), residual_out=work.copy()),
        codec.encode(grad, context(grad), scale=0.5, residual_in=work, residual_out=work),
        codec.encode(grad, context(grad), scale=0.5),
    ):
        expect(payload.nonfinite, "the payload is not marked")
        found = codec.decode(payload, context(grad))
        expect(not found.isfinite().all(), "the payload decodes to finite values")
        if not codec.exact:
            expect(payload.body.nbytes == 0, f"expected no bytes, got {payload.body.nbytes}")
            expect(found.isnan().all(), "the payload does not decode to NaN everywhere")
    if codec.exact:
        found = codec.decode(codec.encode(grad, context(grad)), context(grad))
        expect(bits(found) == bits(grad), "exact is declared, but other bits came out")


@check()
def one_non_finite_rank_shows_in_the_sum(codec: Compressor) -> None:
    """A marked payload turns the whole sum into NaN."""
    good, bad = normal(40), torch.full((40,), torch.nan)
    payloads = [codec.encode(grad, context(grad)) for grad in (good, bad, good)]
    found = codec.decode_sum(payloads, [context(good)] * 3, torch.empty(40))
    expect(found.isnan().all(), "the sum has values that are not NaN")


@check()
def decode_writes_to_out_and_adds_to_out(codec: Compressor) -> None:
    """Decoding returns `out`, of any element type, with or without ctx.spec; `accumulate` adds to it."""
    grad = normal(333).reshape(9, 37)
    payload, ctx = codec.encode(grad, context(grad)), context(grad)
    expected = codec.decode(payload, ctx)
    out = torch.full((9, 37), torch.nan)
    expect(codec.decode(payload, ctx, out=out) is out, "decode does not return out")
    expect(torch.equal(out, expected), "decode writes something else to out")
    alone = codec.decode(payload, replace(ctx, spec=None), out=torch.empty(9, 37))
    expect(torch.equal(alone, expected), "decode gives another result if only out has the shape")
    out = torch.ones(9, 37)
    expect(codec.decode(payload, ctx, out=out, accumulate=True) is out, "decode does not return out")
    expect(torch.equal(out, 1 + expected), "accumulate=True does not add to out")
    for dtype in ELEMENT_TYPES:
        converted = codec.decode(payload, ctx, out=torch.empty(9, 37, dtype=dtype))
        expect(torch.equal(converted, expected.to(dtype)), f"out of {dtype} has other values")


@check()
def unusable_out_is_refused_with_advice(codec: Compressor) -> None:
    """No shape, a wrong size, strides, and an element type that cannot accumulate raise `ValueError`."""
    grad = normal(12)
    payload, ctx = codec.encode(grad, context(grad)), context(grad)
    with about("neither spec nor out"), refusal(ValueError, r"spec=TensorSpec.of\(grad\)"):
        codec.decode(payload, replace(ctx, spec=None))
    with about("an out of another size"), refusal(ValueError, "out has 13 elements, but ctx.spec has 12"):
        codec.decode(payload, ctx, out=torch.empty(13))
    with about("a strided out"), refusal(ValueError, "out must be contiguous"):
        codec.decode(payload, ctx, out=torch.empty(24)[::2])
    with about("float16 to accumulate in"), refusal(ValueError, "accumulate=True needs a float32 out"):
        codec.decode(payload, ctx, out=torch.empty(12, dtype=torch.float16), accumulate=True)
