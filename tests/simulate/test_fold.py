"""One rank for many against all of them."""

import math
from dataclasses import replace

import pytest

from gradwire.core.errors import OptionError
from gradwire.planner.curves import LinearCost
from gradwire.simulate import (
    Cluster,
    Compute,
    SimulatedGradient,
    SimulatedLink,
    SimulatedModel,
    Straggler,
    models,
    step,
)
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import MAX_RANGE_ELEMENTS
from tests.planner.machines import codecs
from tests.simulate.costs import costs, model, onebit

LINK = SimulatedLink(1e9, 20e-6)
KNOWN = costs(20e-6, add=LinearCost(1e-6, 2e-10), onebit=onebit(3e-10, 3e-10))


def both(tensors, plan, cluster):
    return [step(tensors, plan, cluster, KNOWN, fold=fold) for fold in (True, False)]


@pytest.mark.parametrize("method", ["none", "onebit"])
@pytest.mark.parametrize("strategy", ["ring", "scatter_reduce", "allgather"])
@pytest.mark.parametrize("partitions", [8, 24])
def test_equal_parts_fold_to_the_same_step(strategy, method, partitions):
    # 3 · 8 chunks of whole blocks.
    tensors = model(24 * 8192, 24 * 1024, 24 * 2048)
    plan = Plan(method, strategy=strategy, partitions=partitions)
    one, all_ranks = both(tensors, plan, Cluster(8, LINK))
    assert one.folded
    assert not all_ranks.folded
    # Which of the ready chunks goes first may differ.
    assert one.seconds == pytest.approx(all_ranks.seconds, rel=0.05)
    assert one.sent_bytes == pytest.approx(all_ranks.sent_bytes)
    assert one.num_messages == pytest.approx(all_ranks.num_messages)


@pytest.mark.parametrize("method", ["none", "onebit"])
@pytest.mark.parametrize("strategy", ["ring", "scatter_reduce"])
@pytest.mark.parametrize("partitions", [1, 2, 4])
def test_fewer_parts_than_ranks_fold_to_nearly_the_same_step(strategy, method, partitions):
    tensors = SimulatedModel([SimulatedGradient(f"w{index}", (4096, 64), 0.0) for index in range(8)])
    plan = Plan({"*": method}, strategy=strategy, partitions=partitions)
    one, all_ranks = both(tensors, plan, Cluster(8, LINK))
    if (strategy, method, partitions) == ("ring", "none", 1):  # rank 0 adds all of them
        assert one.seconds < all_ranks.seconds < 1.5 * one.seconds
    else:
        assert one.seconds == pytest.approx(all_ranks.seconds, rel=0.25)
    assert one.sent_bytes == pytest.approx(all_ranks.sent_bytes)
    assert one.num_messages == pytest.approx(all_ranks.num_messages)


@pytest.mark.parametrize("strategy", ["ring", "scatter_reduce", "allgather"])
@pytest.mark.parametrize("partitions", [None, 4])
def test_full_tensors_too_large_to_be_fused_fold_to_nearly_the_same_step(strategy, partitions):
    """Each travels in one chunk, however many partitions the plan names."""
    known = replace(KNOWN, codecs=KNOWN.codecs | {"powersgd": replace(codecs()["lanes"], squares=True)})
    shape = (4096, 4096 + 256)
    assert math.prod(shape) > MAX_RANGE_ELEMENTS
    tensors = SimulatedModel([SimulatedGradient(f"w{index}", shape, 0.0) for index in range(64)])
    plan = Plan({"*": "powersgd"}, strategy=strategy, partitions=partitions)
    one, all_ranks = (step(tensors, plan, Cluster(8, LINK), known, fold=fold) for fold in (True, False))
    assert one.seconds == pytest.approx(all_ranks.seconds, rel=0.05)
    assert one.sent_bytes == pytest.approx(all_ranks.sent_bytes)
    assert one.num_messages == pytest.approx(all_ranks.num_messages)


@pytest.mark.parametrize("method", ["none", "onebit"])
def test_a_real_model_folds_to_nearly_the_same_step(method):
    resnet = SimulatedModel.of(models.get("resnet50"), Compute(0.02, 0.05))
    one, all_ranks = both(resnet, method, Cluster(4, LINK))
    assert one.seconds == pytest.approx(all_ranks.seconds, rel=0.05)
    assert one.sent_bytes == pytest.approx(all_ranks.sent_bytes, rel=0.01)


@pytest.mark.parametrize("straggler", [Straggler(slowdown=3), Straggler(delay_seconds=0.02), Straggler(rate_bits=1e8)])
def test_stragglers_are_simulated_next_to_the_one_for_all_others(straggler):
    cluster = Cluster(8, LINK, stragglers={3: straggler})
    one, all_ranks = both(
        model(8 * 65536, compute=Compute(0.0, 0.01)), Plan("onebit", strategy="scatter_reduce"), cluster
    )
    assert len(one.ranks) == 2
    assert sorted(use.stands_for for use in one.ranks) == [1, 7]
    assert one.seconds == pytest.approx(all_ranks.seconds, rel=0.05)


def test_a_ring_with_stragglers_cannot_be_folded():
    cluster = Cluster(8, LINK, stragglers={3: Straggler(slowdown=2)})
    with pytest.raises(OptionError, match="fold=False"):
        step(model(8 * 65536), Plan("none", strategy="ring"), cluster, KNOWN, fold=True)


def test_shared_cores_cannot_be_folded():
    with pytest.raises(OptionError, match="fold=False"):
        step(model(8 * 65536), "none", Cluster(8, LINK, cores=2), KNOWN, fold=True)


@pytest.mark.parametrize(("name", "many"), [("resnet50", 1024), ("vgg19", 4096)])
@pytest.mark.ci
def test_thousands_of_ranks_of_a_model(name, many):
    tensors = SimulatedModel.of(models.get(name), Compute(0.03, 0.07))
    few, more = (step(tensors, "onebit", Cluster(ranks, LINK), KNOWN) for ranks in (64, many))
    assert more.folded
    assert more.seconds > few.seconds
    # No rank sends more than twice its payload, however many there are, apart from headers of ever shorter chunks.
    assert more.sent_bytes < 2 * few.sent_bytes
    assert more.num_messages > many / 64 * few.num_messages
