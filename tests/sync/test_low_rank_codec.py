"""Matrices in one call have the bytes, residuals, states and means that they have one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.compressors.base.registry import make
from gradwire.compressors.powersgd import PowerSGD, matrix
from gradwire.core.errors import SyncError
from gradwire.core.spec import TensorSpec
from gradwire.residuals.transaction import Residuals
from gradwire.sync.fusion import FusionGroup, FusionLayout
from gradwire.sync.fusion_codec import FusionCodec
from gradwire.sync.job import TensorLayout
from gradwire.sync.low_rank_codec import LowRankCodec
from gradwire.sync.plan_entry import PlanEntry
from gradwire.wire.payload import Payload

SHAPES = [(64, 48), (20, 300), (300, 20), (17, 5, 9), (128, 128), (40, 41), (33, 200)]
WORLD_SIZE = 3
Gradients = list[list[torch.Tensor]]


def gradients(step: int) -> Gradients:
    generator = torch.Generator().manual_seed(step)
    return [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(WORLD_SIZE)]


class Job:
    """The ranks of a job that averages one group after another, by scatter-reduce or all-gather."""

    def __init__(self, kind: type[FusionCodec], strategy: str, rank: int = 3) -> None:
        self.kind, self.strategy = kind, strategy
        entry = PlanEntry(make("powersgd", rank=rank), strategy, partitions=1, feedback="error")
        self.layouts = [
            FusionLayout(
                [
                    TensorLayout(
                        f"w{index}", index, entry, torch.float32, int(np.prod(shape)), shape=shape, rotation=index
                    )
                    for index, shape in enumerate(SHAPES)
                ]
            )
            for _ in range(WORLD_SIZE)
        ]
        self.residuals = [Residuals() for _ in range(WORLD_SIZE)]
        self.sent: list[bytes] = []

    def step(self, step: int, given: Gradients, unused: frozenset[tuple[int, int]] = frozenset()) -> Gradients:
        """Average gradients; returns the means of all ranks."""
        means = [[grad.clone() for grad in own] for own in given]
        codecs: list[FusionCodec] = []
        for rank, layout in enumerate(self.layouts):
            used = [(rank, index) not in unused for index in range(len(SHAPES))]
            group = FusionGroup(layout, [each.view(-1) for each in means[rank]], used, 0, step)
            chunks = layout.chunks(WORLD_SIZE if self.strategy == "scatter_reduce" else 1)
            kind = self.kind if self.kind is FusionCodec or LowRankCodec.suits(group) else FusionCodec
            codecs.append(kind(group, self.residuals[rank], rank, WORLD_SIZE, 5))
        for chunk in chunks:
            stats = [self.keep(codec.stats(chunk), rank) for rank, codec in enumerate(codecs)]
            if self.strategy == "scatter_reduce":
                reduced = self.keep(codecs[chunk.index].merge_stats(chunk, stats), chunk.index)
                for rank, codec in enumerate(codecs):
                    if rank != chunk.index:
                        codec.take_reduced_stats(chunk, [reduced])
                others = [
                    self.keep(codecs[rank].start(chunk), rank) for rank in range(WORLD_SIZE) if rank != chunk.index
                ]
                total = self.keep(codecs[chunk.index].encode_and_merge(chunk, others, 1), chunk.index)
                for codec in codecs:
                    codec.decode(chunk, [total], 1)
            else:
                for codec in codecs:
                    codec.reduce_stats(chunk, stats)
                payloads = [self.keep(codec.start(chunk), rank) for rank, codec in enumerate(codecs)]
                for codec in codecs:
                    codec.decode_sum(chunk, payloads)
        for codec, residuals in zip(codecs, self.residuals):
            codec.finish()
            residuals.rollback() if codec.group.nonfinite else residuals.commit()
        return means

    def keep(self, payload: Payload, rank: int) -> Payload:
        self.sent.append(payload.body.tobytes())
        return Payload(payload.body.copy(), payload.nonfinite, payload.used, sender=rank)


def expect_equal(one: Job, other: Job) -> None:
    assert one.sent == other.sent
    for mine, theirs in zip(one.residuals, other.residuals):
        expect_same(mine.state_dict(), theirs.state_dict())
        expect_same(mine.states.state_dict(), theirs.states.state_dict())


def expect_same(one: Any, other: Any) -> None:
    if isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in other:
            expect_same(one[key], other[key])
    elif isinstance(other, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def nothing(grads: Gradients) -> None:
    pass


def zeros(grads: Gradients) -> None:
    for own in grads:
        own[2].zero_()


def not_a_number(grads: Gradients) -> None:
    grads[1][3].view(-1)[7] = float("nan")


def huge(grads: Gradients) -> None:
    for own in grads:
        own[4].mul_(3e37)


@pytest.mark.parametrize("strategy", ["scatter_reduce", "allgather"])
@pytest.mark.parametrize("change", [nothing, zeros, not_a_number, huge])
def test_all_in_one_call_is_one_by_one(strategy: str, change: Callable[[Gradients], None]) -> None:
    batched, plain = Job(LowRankCodec, strategy), Job(FusionCodec, strategy)
    for step in range(5):
        grads = gradients(step)
        if step in (0, 2):
            change(grads)
        unused = frozenset({(1, 2), (2, 2)} if step == 3 else ())
        found, expected = batched.step(step, grads, unused), plain.step(step, grads, unused)
        for mine, theirs in zip(found, expected):
            for one, other in zip(mine, theirs):
                assert torch.equal(torch.nan_to_num(one, 1.0), torch.nan_to_num(other, 1.0))
    expect_equal(batched, plain)


@pytest.mark.parametrize("strategy", ["scatter_reduce", "allgather"])
def test_no_matrix_is_encoded_by_itself_and_a_mean_of_low_rank_is_exact(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("stats", "encode", "accumulate", "finalize"):
        monkeypatch.setattr(PowerSGD, call, lambda *_, **__: pytest.fail("one by one"))
    job, generator = Job(LowRankCodec, strategy, rank=8), torch.Generator().manual_seed(1)
    for step in range(2):
        draw = [
            [[torch.randn(size, generator=generator) for size in matrix(TensorSpec(shape))] for shape in SHAPES]
            for _ in range(WORLD_SIZE)
        ]
        grads = [[torch.outer(*pair).view(shape) for pair, shape in zip(own, SHAPES, strict=True)] for own in draw]
        means = job.step(step, grads)
        for index in range(len(SHAPES)):
            expected = sum(own[index] for own in grads) / WORLD_SIZE
            assert all(torch.allclose(own[index], expected, atol=1e-4) for own in means)


@pytest.mark.parametrize(
    ("damage", "at", "sender"),
    [
        ("short", 2, 1),  # statistics, which rank 1 sends to rank 0
        ("marks", 2, 1),
        ("short", 4, 0),  # their sum, which rank 0 sends to all
        ("marks", 4, 0),
        ("short", 5, 1),  # the first payload after the preliminary round
        ("marks", 5, 1),
        ("nan", 5, 1),
    ],
)
def test_a_damaged_message_names_its_sender(damage: str, at: int, sender: int) -> None:
    job = Job(LowRankCodec, "scatter_reduce")
    keep = job.keep
    count = 0

    def damaged(payload: Payload, rank: int) -> Payload:
        nonlocal count
        count += 1
        kept = keep(payload, rank)
        if count != at:
            return kept
        body = kept.body[:-4] if damage == "short" else kept.body
        if damage == "marks":
            body[:4].view("<u4")[0] += 4
        if damage == "nan":
            body[-4:].view("<f4")[0] = np.nan
        return Payload(body, sender=rank)

    job.keep = damaged  # type: ignore[method-assign]
    with pytest.raises(SyncError, match=f"ank {sender}"):
        job.step(0, gradients(0))
