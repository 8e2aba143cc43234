"""Summable compressors: accumulators add up over ranks and decode to the sum, as integers or as float32."""
# Shapes: N = elements of the tensor, W = ranks

from __future__ import annotations

import numpy as np
import torch

from gradwire.compressors.base import Compressor, SummableCompressor
from gradwire.core.context import Context
from gradwire.core.errors import PayloadError
from gradwire.core.spec import TensorSpec
from gradwire.testing.cases import (
    BACKENDS,
    EMPTY,
    backend,
    context,
    heavy_tailed,
    normal,
    reduced,
    with_body,
)
from gradwire.testing.checks import about, check, expect, refusal
from gradwire.testing.robustness import NUM_CASES, random_bytes, take_or_refuse
from gradwire.wire.payload import Payload


def _is_summable(codec: Compressor) -> bool:
    return isinstance(codec, SummableCompressor)


def _adds_integers(codec: Compressor) -> bool:
    return isinstance(codec, SummableCompressor) and codec.accumulator_dtype(2).kind in "iu"


@check(_is_summable)
def finalized_sum_is_the_sum_of_decodes(codec: SummableCompressor) -> None:
    """Accumulated and finalized payloads give the sum of the decoded payloads, and with integers nearly the mean."""
    for name in BACKENDS:
        for world_size in (1, 2, 7):
            with about(f"{world_size} ranks on {name}"), backend(name):
                _finalized_sum(codec, world_size)


def _finalized_sum(codec: SummableCompressor, world_size: int) -> None:
    grads = [heavy_tailed(735, seed=rank).reshape(21, 35) for rank in range(world_size)]
    ctxs = [context(grad, rank=rank, world_size=world_size) for rank, grad in enumerate(grads)]
    spec, scale = TensorSpec((21, 35)), 1 / world_size
    stats = reduced(codec, grads, scale)
    declared = codec.stats_spec(spec)
    found = [(entry.values.size, entry.reduction) for entry in codec.stats(grads[0], ctxs[0], scale)]
    expect(found == declared, f"stats are {found}, but stats_spec says {declared}")
    payloads = [codec.encode(grad, ctx, stats, scale=scale) for grad, ctx in zip(grads, ctxs, strict=True)]
    total = np.zeros(codec.accumulator_size(spec), codec.accumulator_dtype(world_size))
    for payload, ctx in zip(payloads, ctxs, strict=True):
        codec.accumulate(with_body(payload, bytes(payload.body)), ctx, total)
    finalized = codec.finalize(total, world_size, ctxs[0], stats, torch.empty(21, 35))
    decoded = codec.decode_sum(payloads, ctxs, torch.empty(21, 35), stats=stats)
    near = 1e-6 * max(1.0, float(decoded.abs().max()))
    expect(torch.allclose(finalized, decoded, rtol=1e-5, atol=near), "finalize and decode_sum give different sums")
    if not _adds_integers(codec):
        return
    alone = [accumulated(codec, payload, ctx, total) for payload, ctx in zip(payloads, ctxs, strict=True)]
    expect(
        np.array_equal(total, np.sum(alone, axis=0, dtype=np.int64)), "the sum is not the sum of the payloads' integers"
    )
    mean = torch.stack(grads).mean(0)
    off = float((finalized - mean).norm())
    energy = max(float(grad.norm()) for grad in grads)
    expect(off <= energy, f"the sum is {off:.4g} off the mean of gradients of norm {energy:.4g}")
    expect(float((finalized * mean).sum()) > 0, "the sum does not point where the mean of the gradients does")


def accumulated(codec: SummableCompressor, payload: Payload, ctx: Context, like: np.ndarray) -> np.ndarray:
    """Return an accumulator like this one, with one payload in it."""
    alone = np.zeros_like(like)
    codec.accumulate(payload, ctx, alone)
    return alone


@check(_adds_integers)
def accumulators_never_overflow(codec: SummableCompressor) -> None:
    """The accumulator holds the largest level of every rank, and random bytes contain no larger level."""
    for world_size in (1, 2, 8, 9, 17, 18, 64, 258, 259, 70_000):
        with about(f"{world_size} ranks"):
            dtype = codec.accumulator_dtype(world_size)
            bound = codec.max_contribution(world_size)
            assert bound is not None
            expect(bound * world_size <= np.iinfo(dtype).max, f"{dtype} overflows")
            narrower = {"i4": "i2", "u2": "u1", "u4": "u2"}.get(dtype.str[1:])
            if narrower is not None and codec.options.get("accumulator_bits") is None:
                expect(bound * world_size > np.iinfo(np.dtype(narrower)).max, f"{narrower} would do")
            grad = normal(3000)
            empty = np.zeros(codec.accumulator_size(TensorSpec.of(grad)), dtype)
            num_bytes = codec.encode(grad, context(grad, world_size=world_size), reduced(codec, [grad])).body.nbytes
            largest = 0
            for pattern in (0x00, 0x7F, 0x81, 0xFF):
                payload = with_body(EMPTY, bytes([pattern]) * num_bytes)
                found = accumulated(codec, payload, context(grad, world_size=world_size), empty)
                largest = max(largest, int(np.abs(found.astype(np.int64)).max()))
            expect(largest == bound, f"max_contribution declares {bound}, but levels of up to {largest} were added")


@check(_is_summable)
def a_non_finite_rank_shows_in_the_stats_of_all(codec: SummableCompressor) -> None:
    """A NaN on one rank marks the payloads of all ranks as non-finite, and they cannot be added."""
    good = normal(1200).reshape(30, 40)  # a matrix that low ranks do not leave as it is
    bad = good.clone().index_fill(1, torch.tensor([15]), torch.nan)
    stats = reduced(codec, [good, bad])
    expect(any(np.isinf(entry).any() for entry in stats), "the stats do not show the NaN of one rank")
    for grad in (good, bad):
        payload = codec.encode(grad, context(grad), stats)
        expect(payload.nonfinite, "the payload is not marked")
        with refusal(PayloadError, "non-finite"):
            size = codec.accumulator_size(TensorSpec.of(grad))
            codec.accumulate(payload, context(grad), np.zeros(size, codec.accumulator_dtype(2)))


@check(_is_summable)
def arbitrary_bytes_are_accumulated_or_refused(codec: SummableCompressor) -> None:
    """Random bytes add integers in range or finite values, or raise `PayloadError`."""
    dtype = codec.accumulator_dtype(2)
    for seed in range(NUM_CASES):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(61))
        grad = normal(size)
        num_bytes = codec.encode(grad, context(grad), reduced(codec, [grad])).body.nbytes
        payload = with_body(EMPTY, random_bytes(rng, 60) if seed % 2 else random_bytes(rng, num_bytes, num_bytes))
        with about(f"case {seed}, {size} elements"):
            take_or_refuse(codec, payload, size, stats=reduced(codec, [grad]))
            try:
                empty = np.zeros(codec.accumulator_size(TensorSpec((size,))), dtype)
                found = accumulated(codec, payload, context(grad), empty)
            except PayloadError:
                continue
            expect(np.isfinite(found).all(), "a value that is not finite was added")
            largest = np.abs(found.astype(np.float64)).max(initial=0)
            most = codec.max_contribution(4)
            expect(most is None or largest <= most, f"a level of {largest} was added")
