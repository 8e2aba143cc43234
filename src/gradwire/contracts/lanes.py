"""Summable codecs: lanes that add over ranks and mean the sum; integers, which lose nothing, or float32."""
# Shapes: N = elements of the tensor, W = ranks

from __future__ import annotations

from typing import Any

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
    return codec.summable and codec.lane_dtype(2).kind == "i"


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
    integers = np.sum([payload.body.view(np.int8) for payload in payloads], axis=0, dtype=np.int64)
    expect(np.array_equal(lanes, integers), "lanes are not the sums of the payloads' integers")
    off, step = float((lowered - torch.stack(grads).mean(0)).abs().max()), float(max(stats[0])) / 127
    expect(off <= world_size * step + 1e-6, f"the sum is {off:.4g} off the mean, {world_size} steps of {step:.4g}")


@check(_adds_integers)
def lanes_never_overflow(codec: Compressor) -> None:
    """All ranks at the extreme level, both signs; and no wider lanes than that takes."""
    for world_size in (1, 2, 64, 258, 259, 70_000):
        with about(f"{world_size} ranks"):
            lane: Any = codec.lane_dtype(world_size)
            extreme = torch.tensor([5.0, -5.0])
            payload = codec.encode(extreme, context(extreme), reduced(codec, [extreme]))
            level = codec.lift(payload, context(extreme), np.zeros(2, lane))
            expect((np.abs(level) == 127).all(), f"expected levels of 127, got {level}")
            wide, narrow = (
                level.astype(np.int64) * world_size,
                (level * np.dtype(lane).type(world_size)).astype(np.int64),
            )
            expect((wide == narrow).all(), f"{lane} overflows")
            narrower = {np.dtype(np.int32): np.int16}.get(np.dtype(lane))
            expect(narrower is None or 127 * world_size > np.iinfo(narrower).max, f"{narrower} would do")


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
                lanes = codec.lift(payload, context(grad), np.zeros(size, lane))
            except PayloadError:
                continue
            expect(np.isfinite(lanes).all(), "a value was lifted that is not finite")
            expect(lane.kind != "i" or np.abs(lanes).max(initial=0) <= 127, "a level beyond 127 was lifted")


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
