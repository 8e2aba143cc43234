"""Tensors as DDP hands them over."""

from dataclasses import replace

import pytest

from gradwire.compressors.base.registry import make
from gradwire.core.spec import TensorSpec
from gradwire.planner import PlannedTensor, in_buckets
from gradwire.planner.costs import LinkCosts
from gradwire.planner.fidelity import RankedCompressor
from gradwire.planner.options import for_ranks, options
from tests.planner.machines import codecs, costs


@pytest.mark.parametrize(
    ("bucket_mb", "ready"),
    [(1, [3, 3, 3, 4, 5]), (4, [3, 3, 3, 5, 5]), (0.25, [1, 2, 3, 4, 5]), (100, [3, 3, 3, 5, 5])],
)
def test_tensors_are_ready_with_the_last_one_of_their_bucket(bucket_mb, ready):
    """The first bucket is full with 1 MiB at most; here of 0.25, 0.5, 1, 2 and 0.5 MiB."""
    sizes = (1 << 16, 1 << 17, 1 << 18, 1 << 19, 1 << 17)
    tensors = [PlannedTensor(f"w{index}", (size,), ready=index) for index, size in enumerate(sizes, start=1)]
    found = in_buckets(tensors[::-1], bucket_mb * (1 << 20))
    assert [each.name for each in found] == [each.name for each in tensors]
    assert [each.ready for each in found] == ready


def test_lossless_tensors_share_nothing_with_their_neighbors():
    """They are not fused (`gradwire.sync.fusion.can_be_fused`)."""
    weight = PlannedTensor("w", (100, 100))
    methods = [RankedCompressor(spec, ("allgather",)) for spec in ("lossless", "bit")]
    alone, among = (options(weight, costs(), methods, (1,), neighbors)[-2:] for neighbors in (1, 8))
    assert among[0].route.encode == alone[0].route.encode
    assert among[1].route.encode < alone[1].route.encode


@pytest.mark.parametrize("spec", ["thc", "int8shared"])
@pytest.mark.parametrize("world_size", [4, 32, 1024])
def test_accumulators_are_as_wide_as_a_sum_over_all_ranks_needs(spec, world_size):
    measured = costs(4, codecs={"none": codecs()["none"], spec: codecs()["lanes"]})
    found = for_ranks(measured, world_size)
    compressor, numel = make(spec), 3 << 20
    needed = compressor.accumulator_size(TensorSpec((numel,))) * compressor.accumulator_dtype(world_size).itemsize
    assert found.codec(spec).accumulator_bytes(numel) == pytest.approx(needed, rel=1e-3)
    assert (found.world_size, found.codec("none")) == (world_size, measured.codec("none"))


def test_a_job_of_several_nodes_has_the_links_between_nodes_and_not_that_within_the_one_that_was_measured():
    within, between, native = LinkCosts(1e-6, 1e-11), LinkCosts(1e-4, 1e-9), LinkCosts(1e-6, 2e-11)
    measured = replace(costs(4), links=(between,), ranks_per_node=4, within=within, native=native)
    assert measured.slowest == within
    found = for_ranks(measured, 16)
    assert found.slowest == between and found.within == within
    assert found.native is None, "it was measured within the node"
    assert for_ranks(found, 4).slowest == within
    assert for_ranks(measured, 4) == measured
