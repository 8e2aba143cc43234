"""Summable codecs: integers that add over ranks and mean the sum."""
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


@check(_is_summable)
def lowered_sum_of_lifts_is_the_sum_of_decodes(codec: Compressor) -> None:
    """Lifted, added as integers and lowered: the sum of what the payloads decode to, and near the mean."""
    for name in BACKENDS:
        for world_size in (1, 2, 7):
            with about(f"{world_size} ranks on {name}"), backend(name):
                _lowered_sum(codec, world_size)


def _lowered_sum(codec: Compressor, world_size: int) -> None:
    grads = [heavy_tailed(733, seed=rank) for rank in range(world_size)]
    ctxs = [context(grad, rank=rank, world_size=world_size) for rank, grad in enumerate(grads)]
    spec, scale = TensorSpec((733,)), 1 / world_size
    stats = reduced(codec, grads, scale)
    declared = codec.stats_spec(spec)
    expect([(entry.size, "max") for entry in stats] == declared, f"stats are not what stats_spec says, {declared}")
    payloads = [
        codec.encode_compensated(grad, ctx, None, scale=scale, stats=stats)
        for grad, ctx in zip(grads, ctxs, strict=True)
    ]
    lanes = np.full(codec.num_lanes(spec), 99, codec.lane_dtype(world_size))
    for rank, (payload, ctx) in enumerate(zip(payloads, ctxs, strict=True)):
        codec.lift(with_body(payload, bytes(payload.body)), ctx, lanes, accumulate=rank > 0)
    integers = np.sum([payload.body.view(np.int8) for payload in payloads], axis=0, dtype=np.int64)
    expect(np.array_equal(lanes, integers), "lanes are not the sums of the payloads' integers")
    lowered = codec.lower(lanes, world_size, ctxs[0], stats, torch.empty(733))
    decoded = codec.decode_sum(payloads, ctxs, torch.empty(733), stats=stats)
    expect(torch.allclose(lowered, decoded, rtol=1e-5, atol=1e-6), "lower gives another sum than decode_sum")
    off, step = float((lowered - torch.stack(grads).mean(0)).abs().max()), float(max(stats[0])) / 127
    expect(off <= world_size * step + 1e-6, f"the sum is {off:.4g} off the mean, {world_size} steps of {step:.4g}")


@check(_is_summable)
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
    good, bad = normal(300), normal(300).index_fill(0, torch.tensor([150]), torch.nan)
    stats = reduced(codec, [good, bad])
    expect(any(np.isinf(entry).any() for entry in stats), "the stats do not show the NaN of one rank")
    for grad in (good, bad):
        payload = codec.encode(grad, context(grad), stats)
        expect(payload.nonfinite, "the payload is not marked")
        with refusal(PayloadError, "non-finite"):
            codec.lift(payload, context(grad), np.zeros(300, np.int16))


@check(_is_summable)
def arbitrary_bytes_are_lifted_or_refused(codec: Compressor) -> None:
    """Random bytes as integers: levels in range, or `PayloadError`."""
    for seed in range(NUM_CASES):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(61))
        grad, payload = (
            normal(size),
            with_body(EMPTY, random_bytes(rng, 60) if seed % 2 else random_bytes(rng, size, size)),
        )
        with about(f"case {seed}, {size} elements"):
            take_or_refuse(codec, payload, size, stats=reduced(codec, [grad]))
            try:
                lanes = codec.lift(payload, context(grad), np.zeros(size, np.int16))
            except PayloadError:
                continue
            expect(np.abs(lanes).max(initial=0) <= 127, "a level beyond 127 was lifted")


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
