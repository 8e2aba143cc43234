"""Sizes that receivers rely on, and memory use."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import torch

from gradwire.compressors.base import Compressor
from gradwire.compressors.base.traced import TracedCompressor
from gradwire.core.spec import TensorSpec
from gradwire.testing.cases import context, float32_context, heavy_tailed, normal, selects
from gradwire.testing.checks import about, check, expect
from gradwire.wire.payload import Payload


@check()
def max_encoded_bytes_is_a_bound(codec: Compressor) -> None:
    """No payload exceeds `max_encoded_bytes`, and each is uint8 of one dimension."""
    families: tuple[Callable[[int], torch.Tensor], ...] = (normal, heavy_tailed, torch.ones, torch.zeros)
    for size in (*range(18), 63, 64, 65, 1023, 1024, 1025, 4100):
        for make in families:
            grad = make(size)
            body = codec.encode(grad, context(grad)).body
            most = codec.max_encoded_bytes(TensorSpec.of(grad))
            expect(body.nbytes <= most, f"{size} elements: expected at most {most} bytes, got {body.nbytes}")
            expect(body.dtype == np.uint8 and body.ndim == 1, f"expected uint8[bytes], got {body.dtype}{body.shape}")


def _is_compiled(codec: Compressor) -> bool:
    return isinstance(codec, TracedCompressor) or type(codec).__module__.startswith("gradwire.")


@check(_is_compiled)
def encode_allocates_the_payload_and_decode_nothing(codec: Compressor) -> None:
    """Encode allocates little more than the payload, and decode next to nothing, after the first call.

    Selection needs histograms of fixed size, and sorts about as many elements as it keeps. With a preliminary round,
    some memory is needed for each of its values.
    """
    for feedback in (False, True):
        with about("with feedback" if feedback else "without feedback"):
            _allocations(codec, np.zeros(400_000, np.float32) if feedback else None)


def _allocations(codec: Compressor, work: np.ndarray | None) -> None:
    grad, ctx = heavy_tailed(400_000), float32_context(torch.empty(400_000))
    out = torch.empty(400_000)

    def encode() -> Payload:
        return codec.encode(grad, ctx, scale=0.5, residual_in=work, residual_out=work)

    payload = encode()
    slack = 64 * 1024 + 128 * sum(length for length, _ in codec.stats_spec(TensorSpec((400_000,))))
    bound = codec.max_encoded_bytes(TensorSpec((400_000,)))
    _expect_peak("encode", encode, bound + slack + selects(codec) * (2 * bound + (1 << 20)))
    _expect_peak("decode", lambda: codec.decode(payload, ctx, out=out), slack)
    _expect_peak("decode_sum", lambda: codec.decode_sum([payload] * 3, [ctx] * 3, out), slack)


def _expect_peak(name: str, action: Callable[[], object], most: int) -> None:
    found = peak(action)
    expect(found <= most, f"expected {name} to allocate at most {most} bytes, got {found}")


def peak(action: Callable[[], object]) -> int:
    """Return the most bytes that a repeated call holds at once, as NumPy reports them to tracemalloc.

    The least of three calls: the interpreter and other threads allocate, too.
    """
    action()
    return min(_peak_of_one_call(action) for _ in range(3))


def _peak_of_one_call(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
