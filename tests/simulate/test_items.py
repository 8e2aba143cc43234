"""What travels together: bundles, batches and buckets, against closed forms and the synchronizer itself."""

import pytest
import torch

from gradwire.compressors.base.registry import make
from gradwire.core.spec import TensorSpec
from gradwire.simulate import Cluster, SimulatedGradient, SimulatedLink, step
from gradwire.simulate.items import items_of
from gradwire.sync.dense_fusion import DENSE_FUSION_BYTES
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice
from gradwire.wire.frame import HEADER_BYTES
from tests.simulate.costs import costs, gradients, onebit
from tests.sync.harness import ranks

RATE = 1e9
KNOWN = costs(onebit=onebit())
MARK = 4  # bytes of a tensor in a bundle's message, beside its payload


def cluster(world_size, **options):
    return Cluster(world_size, SimulatedLink(RATE, header_bytes=0), **options)


def payload(numel):
    return make("onebit").max_encoded_bytes(TensorSpec((numel,)))


def vectors(*counts, ready=0.0):
    return [SimulatedGradient(f"layer{index}.bias", (count,), ready * index) for index, count in enumerate(counts)]


def names(tensors, plan, bucket_bytes=None):
    return [(item.name, item.ready_seconds) for item in items_of(tensors, plan, cluster(4), KNOWN, 1.0, bucket_bytes)]


def test_small_tensors_of_a_bucket_travel_as_one():
    tensors = gradients(*[16384] * 8)
    one = step(tensors, "onebit", cluster(4), KNOWN, bucket_bytes=1 << 30, strategy="allgather")
    assert [item.name for item in one.items] == ["layer0.weight and 7 more"]
    assert one.num_messages == 4 * 3
    assert one.sent_bytes == 3 * 8 * (payload(16384) + MARK)
    assert one.seconds == pytest.approx(one.sent_bytes * 8 / RATE)


def test_the_owner_of_a_small_tensor_takes_it_whole():
    # All others send to it, one after another, and it sends the mean to all: a share of a large tensor takes a W-th.
    alone = step(gradients(16384), "onebit", cluster(8), KNOWN, strategy="scatter_reduce")
    assert alone.seconds == pytest.approx(2 * 7 * (payload(16384) + MARK) * 8 / RATE)
    # Eight tensors of a bucket have an owner each, so that all links are in use.
    eight = step(gradients(*[16384] * 8), "onebit", cluster(8), KNOWN, bucket_bytes=1 << 30, strategy="scatter_reduce")
    assert eight.seconds == pytest.approx(alone.seconds)
    assert eight.num_messages == 8 * alone.num_messages


def test_a_bundle_takes_one_task_and_each_of_its_codecs():
    known = costs(1e-3, onebit=onebit(encode=1e-7, decode=1e-7))
    tensors = gradients(*[16384] * 8)
    one = step(tensors, "onebit", Cluster(2, SimulatedLink(None)), known, bucket_bytes=1 << 30, strategy="allgather")
    # Encode, send, recv and decode; a payload of each of two ranks is decoded.
    assert one.seconds == pytest.approx(4e-3 + 8 * 16384 * 3e-7, rel=0.02)


def test_large_tensors_of_a_bucket_are_cut_as_ever():
    tensors = gradients(1 << 18, 1 << 18)
    result = step(tensors, "onebit", cluster(4), KNOWN, bucket_bytes=1 << 30, strategy="scatter_reduce")
    assert len(result.items) == 2
    assert result.sent_bytes == pytest.approx(2 * 2 * 3 * payload(1 << 16), rel=0.01)


def test_a_bucket_is_handed_over_with_its_last_gradient():
    tensors = [SimulatedGradient(f"{index}.weight", (1024, 1024), float(index)) for index in range(4)]
    assert names(tensors, Plan("none"), 8 << 20) == [
        ("0.weight", 2.0),
        ("1.weight", 2.0),
        ("2.weight", 4.0),
        ("3.weight", 4.0),
    ]


def test_small_dense_tensors_leave_when_a_batch_is_full():
    count = DENSE_FUSION_BYTES // 4 // 2
    tensors = vectors(*[count] * 5, ready=1.0)
    assert names(tensors, Plan("onebit")) == [
        ("layer0.bias and 1 more", 2.0),
        ("layer2.bias and 1 more", 4.0),
        ("layer4.bias", 5.0),
    ]


@pytest.mark.parametrize("strategy", ["scatter_reduce", "allgather"])
def test_the_synchronizer_sends_the_same_bytes(strategy):
    # Bundled, cut, and batched in two messages: matrices in the order of backward, each with its vector.
    shapes = [(128, 512), (9000,), (64, 256), (9000,), (1024, 256), (100,)]
    tensors = [SimulatedGradient(f"tensor{index}", shape) for index, shape in enumerate(shapes)]
    plan = Plan("onebit", strategy=strategy)
    simulated = step(tensors, plan, cluster(4), KNOWN, bucket_bytes=1 << 30)
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


@pytest.mark.parametrize("strategy", ["scatter_reduce", "allgather"])
def test_one_rank_stands_for_all_in_a_bundle_too(strategy):
    tensors = gradients(*[16384] * 16)
    how = {"bucket_bytes": 1 << 30, "strategy": strategy}
    one, all_ranks = (step(tensors, "onebit", cluster(8), KNOWN, fold=fold, **how) for fold in (True, False))
    assert one.seconds == pytest.approx(all_ranks.seconds, rel=0.05)
    assert one.sent_bytes == pytest.approx(all_ranks.sent_bytes)
    assert one.num_messages == pytest.approx(all_ranks.num_messages)
