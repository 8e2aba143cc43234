"""Sizes and options of batches."""

from gradwire.planner import PlannedTensor
from gradwire.planner.batches import Batch, Batches, Size
from gradwire.planner.closed_forms import route
from gradwire.planner.options import options
from tests.planner.machines import METHODS, costs


def test_dense_tensors_join_the_small_ones_of_their_bucket_and_strategy():
    job = costs()
    batches = Batches(job, [PlannedTensor("bias", (100,), ready=1.0), PlannedTensor("norm", (50,), ready=2.0)])
    weight = PlannedTensor("weight", (10, 10), ready=2.0)
    chosen = {(each.spec, each.strategy): each for each in options(weight, job, METHODS) if each.batched}
    small = next(each for each in batches.options(["none"]) if each.strategy == "ring")
    first, second = Batch(1.0, "none", "ring"), Batch(2.0, "none", "ring")
    together = batches.sizes(small, [(weight, chosen["none", "ring"])])
    assert together == {first: Size(100, 400), second: Size(150, 600)}
    apart = batches.sizes(small, [(weight, chosen["none", "allgather"])])
    assert apart == {first: Size(100, 400), second: Size(50, 200), Batch(2.0, "none", "allgather"): Size(100, 400)}


def test_a_batch_has_a_range_for_each_rank_and_the_route_of_its_elements():
    job = costs(world_size=4)
    option = Batches(job, []).option("none", "scatter_reduce", Size(100_000, 400_000))
    assert (option.partitions, option.batched) == (4, True)
    assert option.route.seconds == route("none", "scatter_reduce", 4, 100_000, job).seconds
    assert Batches(job, []).option("none", "allgather", Size(100_000, 400_000)).partitions == 1


def test_a_dense_tensor_takes_its_part_of_what_a_batch_of_equal_ones_takes():
    job, weight = costs(), PlannedTensor("weight", (100, 100))
    alone, shared = (
        next(each.route for each in options(weight, job, METHODS, neighbors=count) if each.strategy == "ring")
        for count in (1, 8)
    )
    together = route("none", "ring", 4, 80_000, job)
    for name in ("encode", "decode", "wire"):
        assert abs(getattr(shared, name) - getattr(together, name) / 8) < 1e-12
        assert getattr(shared, name) < getattr(alone, name)
