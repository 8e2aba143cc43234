"""Summable codecs: lanes that add over ranks and mean the sum; integers, which lose nothing, or float32."""
# Shapes: N = elements of the tensor, W = ranks

from __future__ import annotations

import numpy as np
import torch

from gradwire.compressors.base import Compressor
from gradwire.contracts.cases import (
    BACKENDS,
    EMPTY,
    backend,
    context,
    heavy_tailed,
    normal,
    reduced,
    with_body,
)
from gradwire.contracts.checks import about, check, expect, refusal
from gradwire.contracts.robustness import NUM_CASES, random_bytes, take_or_refuse
from gradwire.core.errors import PayloadError
from gradwire.core.spec import TensorSpec


def _is_summable(codec: Compressor) -> bool:
    return codec.summable


def _adds_integers(codec: Compressor) -> bool:
    return codec.summable and codec.lane_dtype(2).kind in "iu"


@check(_is_summable)
def lowered_sum_of_lifts_is_the_sum_of_decodes(codec: Compressor) -> None:
    """Lifted, added and lowered: the sum of what the payloads decode to; of integers, near the mean."""
    for name in BACKENDS:
        for world_size in (1, 2, 7):
            with about(f"{world_size} ranks on {name}"), backend(name):
                _lowered_sum(codec, world_size)


def _lowered_sum(codec: Compressor, world_size: int) -> None:
    grads = [heavy_tailed(735, seed=rank).reshape(21, 35) for rank in range(world_size)]
    ctxs = [context(grad, rank=rank, world_size=world_size) for rank, grad in enumerate(grads)]
    spec, scale = TensorSpec((21, 35)), 1 / world_size
    stats = reduced(codec, grads, scale)
    declared = codec.stats_spec(spec)
    found = [(entry.values.size, entry.reduction) for entry in codec.stats(grads[0], ctxs[0], scale)]
    expect(found == declared, f"stats are {found} and not what stats_spec says, {declared}")
    payloads = [
        codec.encode_compensated(grad, ctx, None, scale=scale, stats=stats)
        for grad, ctx in zip(grads, ctxs, strict=True)
    ]
    lanes = np.full(codec.num_lanes(spec), 99, codec.lane_dtype(world_size))
    for rank, (payload, ctx) in enumerate(zip(payloads, ctxs, strict=True)):
        codec.lift(with_body(payload, bytes(payload.body)), ctx, lanes, accumulate=rank > 0)
    lowered = codec.lower(lanes, world_size, ctxs[0], stats, torch.empty(21, 35))
    decoded = codec.decode_sum(payloads, ctxs, torch.empty(21, 35), stats=stats)
    near = 1e-6 * max(1.0, float(decoded.abs().max()))
    expect(torch.allclose(lowered, decoded, rtol=1e-5, atol=near), "lower gives another sum than decode_sum")
    if not _adds_integers(codec):
        return
    alone = [
        codec.lift(payload, ctx, np.zeros(lanes.size, lanes.dtype)) for payload, ctx in zip(payloads, ctxs, strict=True)
    ]
    expect(np.array_equal(lanes, np.sum(alone, axis=0, dtype=np.int64)), "lanes are not the sums of payloads' integers")
    off = float((lowered - torch.stack(grads).mean(0)).norm())
    energy = max(float(grad.norm()) for grad in grads)
    expect(off <= energy, f"the sum is {off:.4g} off the mean, of gradients no longer than {energy:.4g}")


@check(_adds_integers)
def lanes_never_overflow(codec: Compressor) -> None:
    """The sum of as many of the largest level as there are ranks; levels of random bytes are no larger."""
    for world_size in (1, 2, 8, 9, 17, 18, 64, 258, 259, 70_000):
        with about(f"{world_size} ranks"):
            lane = codec.lane_dtype(world_size)
            bound = codec.lane_bound(world_size)
            expect(bound * world_size <= np.iinfo(lane).max, f"{lane} overflows")
            narrower = {"i4": "i2", "u2": "u1", "u4": "u2"}.get(lane.str[1:])
            if narrower is not None and codec.options.get("lane_bits") is None:
                expect(bound * world_size > np.iinfo(np.dtype(narrower)).max, f"{narrower} would do")
            grad = normal(3000)
            lanes = np.zeros(codec.num_lanes(TensorSpec.of(grad)), lane)
            num_bytes = codec.encode(grad, context(grad, world_size=world_size), reduced(codec, [grad])).body.nbytes
            largest = 0
            for pattern in (0x00, 0x7F, 0x81, 0xFF):
                payload = with_body(EMPTY, bytes([pattern]) * num_bytes)
                found = codec.lift(payload, context(grad, world_size=world_size), lanes)
                largest = max(largest, int(np.abs(found.astype(np.int64)).max()))
            expect(largest == bound, f"lane_bound declares {bound}, lifted were levels of up to {largest}")


@check(_is_summable)
def a_non_finite_rank_shows_in_the_stats_of_all(codec: Compressor) -> None:
    """A NaN on one rank makes the payloads of all ranks marked ones, which cannot be lifted."""
    good = normal(1200).reshape(30, 40)  # a matrix that low ranks do not leave as it is
    bad = good.clone().index_fill(1, torch.tensor([15]), torch.nan)
    stats = reduced(codec, [good, bad])
    expect(any(np.isinf(entry).any() for entry in stats), "the stats do not show the NaN of one rank")
    for grad in (good, bad):
        payload = codec.encode(grad, context(grad), stats)
        expect(payload.nonfinite, "the payload is not marked")
        with refusal(PayloadError, "non-finite"):
            codec.lift(payload, context(grad), np.zeros(codec.num_lanes(TensorSpec.of(grad)), codec.lane_dtype(2)))


@check(_is_summable)
def arbitrary_bytes_are_lifted_or_refused(codec: Compressor) -> None:
    """Random bytes: integers in range, or finite values, or `PayloadError`."""
    lane = codec.lane_dtype(2)
    for seed in range(NUM_CASES):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(61))
        grad, payload = (
            normal(size),
            with_body(
                EMPTY, random_bytes(rng, 60) if seed % 2 else random_bytes(rng, *2 * (_payload_bytes(codec, size),))
            ),
        )
        with about(f"case {seed}, {size} elements"):
            take_or_refuse(codec, payload, size, stats=reduced(codec, [grad]))
            try:
                lanes = codec.lift(payload, context(grad), np.zeros(codec.num_lanes(TensorSpec((size,))), lane))
            except PayloadError:
                continue
            expect(np.isfinite(lanes).all(), "a value was lifted that is not finite")
            largest = np.abs(lanes.astype(np.float64)).max(initial=0)
            expect(lane.kind == "f" or largest <= codec.lane_bound(4), f"a level of {largest} was lifted")


def _payload_bytes(codec: Compressor, size: int) -> int:
    """Of a vector, encoded with shared values."""
    grad = normal(size)
    return codec.encode(grad, context(grad), reduced(codec, [grad])).body.nbytes


@check(lambda codec: not codec.summable)
def others_say_that_they_are_not_summable(codec: Compressor) -> None:
    """A codec that is not summable refuses everything about lanes."""
    grad = normal(4)
    for call in (
        lambda: codec.lane_dtype(2),
        lambda: codec.num_lanes(TensorSpec((4,))),
        lambda: codec.lift(EMPTY, context(grad), np.zeros(4, np.int16)),
        lambda: codec.lower(np.zeros(4, np.int16), 1, context(grad), [], torch.empty(4)),
    ):
        with refusal(NotImplementedError, "is not summable"):
            call()
