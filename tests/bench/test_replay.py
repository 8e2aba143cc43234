"""A replay of a recorded backward pass, in a group of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from gradwire.bench import methods
from gradwire.bench.job import BenchmarkJob, Segment
from gradwire.bench.rank import Rank
from gradwire.bench.recording import record, record_all
from gradwire.bench.replay import Replay


@pytest.fixture
def alone() -> Iterator[Rank]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Rank(BenchmarkJob("digits", (), folder="", replay=True))
    dist.destroy_process_group()


def test_bucket_sizes_share_the_duration_of_one_step_and_its_gradients() -> None:
    """Two records of the same step differ by more than a method may gain."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    segments = tuple(Segment(methods.DDP_FP32, bucket_mb) for bucket_mb in (25.0, 0.001, 25.0))
    found = record_all(Rank(BenchmarkJob("digits", segments, folder="", replay=True)))
    dist.destroy_process_group()
    small, large = found[0.001], found[25.0]
    assert len(small.buckets) > len(large.buckets) == 1
    assert (small.backward_seconds, small.step_seconds) == (large.backward_seconds, large.step_seconds)
    assert 0 < large.buckets[-1].ready_seconds <= large.backward_seconds
    assert sum(map(float, (each.gradients[0].sum() for each in small.buckets))) == pytest.approx(
        float(large.buckets[0].gradients[0].sum()), rel=1e-4
    )


def test_each_step_has_the_gradients_of_one_recorded_step(alone: Rank) -> None:
    """If they were added to those of the step before, compressors would find hardly anything new to send."""
    recording = record(alone, bucket_mb=25.0)
    kept = len(recording.buckets[0].gradients)
    recorded = [{} for _ in range(kept)]
    for bucket in recording.buckets:
        for step, gradients in enumerate(bucket.gradients):
            recorded[step] |= zip(bucket.names, (each.clone() for each in bucket.views(gradients)), strict=True)
    replay = Replay.begin(alone, Segment(methods.DDP_FP32), recording)
    for step in range(1, 3 * kept):
        replay.step()
        found = {methods.full_name(name): each.grad for name, each in replay.ddp.module.named_parameters()}
        assert found.keys() == recorded[step % kept].keys()
        assert all(torch.equal(found[name], expected) for name, expected in recorded[step % kept].items())
    replay.connection.close()
