"""Tensor fusion and buckets against closed forms and the synchronizer itself."""

from dataclasses import replace

import pytest
import torch

from gradwire.compressors.base.registry import make
from gradwire.core.spec import TensorSpec
from gradwire.planner.curves import LinearCost
from gradwire.simulate import Cluster, Compute, SimulatedGradient, SimulatedLink, SimulatedModel, step
from gradwire.simulate.jobs import jobs_of
from gradwire.sync.fusion import DenseGroup
from gradwire.sync.job import TensorLayout
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.synchronizer import GradientSlice
from gradwire.wire.frame import HEADER_BYTES
from tests.simulate.costs import costs, model, onebit, summed
from tests.sync.harness import ranks

RATE = 1e9
KNOWN = costs(onebit=onebit(), int8shared=summed(1.0), powersgd=summed(squares=True))
LENGTH = 4  # bytes per tensor in the message of a fusion group, besides its payload


def cluster(world_size, **options):
    return Cluster(world_size, SimulatedLink(RATE, header_bytes=0), **options)


def payload(numel):
    return make("onebit").max_encoded_bytes(TensorSpec((numel,)))


def vectors(*counts, ready=0.0):
    return [SimulatedGradient(f"layer{index}.bias", (count,), ready * index) for index, count in enumerate(counts)]


def names(tensors, plan, bucket_bytes=None):
    submitted = SimulatedModel(tensors, Compute(forward_seconds=1.0), bucket_bytes)
    return [(job.name, job.ready_seconds) for job in jobs_of(submitted, plan, cluster(4), KNOWN)]


def test_small_tensors_of_a_bucket_travel_as_one():
    tensors = model(*[16384] * 8, bucket_bytes=1 << 30)
    one = step(tensors, Plan("onebit", strategy="allgather"), cluster(4), KNOWN)
    assert [job.name for job in one.jobs] == ["layer0.weight and 7 more"]
    assert one.num_messages == 4 * 3
    assert one.sent_bytes == 3 * 8 * (payload(16384) + LENGTH)
    assert one.seconds == pytest.approx(one.sent_bytes * 8 / RATE)


def test_the_owner_of_a_small_tensor_takes_it_whole():
    # All others send to it, one after another, and it sends the mean to all: a share of a large tensor takes a W-th.
    alone = step(model(16384), Plan("onebit", strategy="scatter_reduce"), cluster(8), KNOWN)
    assert alone.seconds == pytest.approx(2 * 7 * (payload(16384) + LENGTH) * 8 / RATE)
    # Eight tensors of a bucket have an owner each, so that all links are in use.
    eight = step(
        model(*[16384] * 8, bucket_bytes=1 << 30), Plan("onebit", strategy="scatter_reduce"), cluster(8), KNOWN
    )
    assert eight.seconds == pytest.approx(alone.seconds)
    assert eight.num_messages == 8 * alone.num_messages


def test_a_fusion_group_takes_one_task_and_each_of_its_codecs():
    known = costs(1e-3, onebit=onebit(encode=1e-7, decode=1e-7))
    tensors = model(*[16384] * 8, bucket_bytes=1 << 30)
    one = step(tensors, Plan("onebit", strategy="allgather"), Cluster(2, SimulatedLink(None)), known)
    # Encode, send, recv and decode; a payload of each of two ranks is decoded.
    assert one.seconds == pytest.approx(4e-3 + 8 * 16384 * 3e-7, rel=0.02)


def test_a_fusion_group_pays_once_for_what_its_tensors_share():
    call = LinearCost(1e-3, 1e-7)
    codec = replace(onebit(), encode=call, merge=call, shared_encode=1e-3, shared_merge=1e-4)
    seconds = [
        step(model(*[16384] * 8, bucket_bytes=1 << 30), Plan("onebit", strategy="allgather"),
             Cluster(2, SimulatedLink(None)), costs(1e-3, onebit=each)).seconds
        for each in (codec, replace(codec, shared_encode=0.0, shared_merge=0.0))
    ]  # fmt: skip
    # Of eight encodes and of the merges of two payloads each.
    assert seconds[1] - seconds[0] == pytest.approx(7 * (1e-3 + 2 * 1e-4))


def test_large_tensors_of_a_bucket_are_cut_as_ever():
    tensors = model(1 << 18, 1 << 18, bucket_bytes=1 << 30)
    result = step(tensors, Plan("onebit", strategy="scatter_reduce"), cluster(4), KNOWN)
    assert len(result.jobs) == 2
    assert result.sent_bytes == pytest.approx(2 * 2 * 3 * payload(1 << 16), rel=0.01)


def test_a_bucket_is_handed_over_with_its_last_gradient():
    tensors = [SimulatedGradient(f"{index}.weight", (1024, 1024), float(index)) for index in range(4)]
    assert names(tensors, Plan("none"), 8 << 20) == [
        ("0.weight", 1.0),
        ("1.weight and 1 more", 3.0),
        ("3.weight", 4.0),
    ]


def test_the_first_bucket_is_full_with_a_mebibyte_as_ddps():
    tensors = [SimulatedGradient(f"{index}.weight", (1 << 17,), float(index)) for index in range(6)]
    assert names(tensors, Plan("none"), 25 << 20) == [
        ("0.weight and 1 more", 2.0),
        ("2.weight and 3 more", 6.0),
    ]


def test_dense_tensors_of_a_bucket_travel_together():
    assert names(vectors(*[1000] * 5, ready=1.0), Plan("onebit"), 8000) == [
        ("layer0.bias and 1 more", 2.0),
        ("layer2.bias and 1 more", 4.0),
        ("layer4.bias", 5.0),
    ]


@pytest.mark.parametrize(("strategy", "expected"), [("ring", [0, 0, 0]), ("scatter_reduce", [0, 2, 4])])
def test_dense_tensors_of_a_bucket_begin_where_the_synchronizers_do(strategy, expected):
    entry, tensors = PlanEntry(make("none"), strategy, None, "none", batched=True), vectors(*[1000] * 5)
    plan = Plan.of_entries({each.name: entry for each in tensors})
    jobs = jobs_of(SimulatedModel(tensors, bucket_bytes=8000), plan, cluster(4), KNOWN)
    layouts = [
        TensorLayout(each.name, index, entry, torch.float32, 1000, rotation=index) for index, each in enumerate(tensors)
    ]
    groups = [DenseGroup.of(layouts[first : first + 2]) for first in (0, 2, 4)]
    assert [job.rotation for job in jobs] == [group.layout.rotation for group in groups] == expected


def test_a_cast_batch_and_tensors_compressed_by_the_same_cast_travel_apart():
    entries = [PlanEntry(make("bf16"), "allgather", 1, "none", batched) for batched in (True, False)]
    plan = Plan.of_entries({"layer0.weight": entries[1], "layer1.bias": entries[0]})
    tensors = [SimulatedGradient("layer0.weight", (100, 100)), SimulatedGradient("layer1.bias", (100,))]
    known = replace(KNOWN, codecs={**KNOWN.codecs, "bf16": KNOWN.codecs["onebit"]})
    jobs = jobs_of(SimulatedModel(tensors, bucket_bytes=1 << 30), plan, cluster(4), known)
    assert [job.name for job in jobs] == ["layer0.weight", "layer1.bias"]


@pytest.mark.parametrize("method", ["onebit", "int8shared", "powersgd"])
@pytest.mark.parametrize("strategy", ["scatter_reduce", "allgather"])
def test_the_synchronizer_sends_the_same_bytes(strategy, method):
    # Compressed and fused, cut, and dense: matrices in the order of backward, each with its vector.
    shapes = [(128, 512), (9000,), (64, 256), (9000,), (100,), (1024, 256)]
    tensors = [SimulatedGradient(f"tensor{index}", shape) for index, shape in enumerate(shapes)]
    plan = Plan(method, strategy=strategy)
    simulated = step(SimulatedModel(tensors, bucket_bytes=1 << 30), plan, cluster(4), KNOWN)
    registered = {each.name: each.spec for each in reversed(tensors)}
    with ranks(4, plan, tensors=registered) as group:

        def run(synchronizer):
            synchronizer.begin_step()
            synchronizer.submit([GradientSlice(each.name, torch.ones(each.shape)) for each in tensors])
            synchronizer.wait()
            return sum(synchronizer._runtime.transport.sent_bytes)

        sent = sum(group.each(run))
    bodies = 4 * simulated.sent_bytes
    assert bodies + HEADER_BYTES * simulated.num_messages == pytest.approx(sent, rel=1e-6)


@pytest.mark.parametrize("method", ["onebit", "powersgd"])
@pytest.mark.parametrize("strategy", ["scatter_reduce", "allgather"])
def test_one_rank_stands_for_all_in_a_fusion_group_too(strategy, method):
    tensors, plan = model(*[16384] * 16, bucket_bytes=1 << 30), Plan(method, strategy=strategy)
    one, all_ranks = (step(tensors, plan, cluster(8), KNOWN, fold=fold) for fold in (True, False))
    assert one.seconds == pytest.approx(all_ranks.seconds, rel=0.05)
    assert one.sent_bytes == pytest.approx(all_ranks.sent_bytes)
    assert one.num_messages == pytest.approx(all_ranks.num_messages)
