"""Tensor selection of DRAGONN (section 4.2) by the planner's one model: which tensors sparsifying pays for."""

from dataclasses import replace

import pytest

from gradwire.planner import PlannedTensor, plan
from gradwire.planner.closed_forms import native_seconds, route
from gradwire.planner.costs import CodecCosts
from gradwire.planner.curves import LinearCost
from gradwire.planner.fidelity import DENSE, LISTED, RankedCompressor, methods
from gradwire.simulate import Cluster, SimulatedGradient, SimulatedLink, SimulatedModel, step
from gradwire.sync.plan import Plan
from tests.planner.machines import costs

DRAGONN, DGC = RankedCompressor.of("dragonn", LISTED), RankedCompressor.of("dgc", LISTED)
LAUNCH = 20e-6  # of a kernel: what makes small tensors not worth it


def described(rate, world_size=16):
    """A GPU as the paper has it: 13.2 and 35.4 ms for 512 MB, and whatever is small takes a launch."""

    def codec(encode_ms):
        kernel = LinearCost(LAUNCH, 1e-11)
        return CodecCosts(LinearCost(3 * LAUNCH, encode_ms / 1e3 / 134e6), kernel, kernel, LinearCost(4, 0.004))

    job = costs(world_size, rate, latency=2e-5)
    return replace(job, codecs={"none": job.codecs["none"], "dgc": codec(35.4), "dragonn": codec(13.2)})


def compressed(numel, job):
    (row,) = plan([PlannedTensor("w", (numel // 64, 64))], job, [DRAGONN], min_elements=0, min_gain=0).rows
    return row.spec == "dragonn"


def test_auto_may_choose_dragonn():
    assert DRAGONN in methods("aggressive")
    assert DRAGONN not in methods("balanced")


def test_of_two_sparsifiers_the_one_that_encodes_faster_is_chosen_for_large_tensors_alone():
    model = [PlannedTensor(f"block{index}", (64, 64), ready=1e-3 * index) for index in range(20)]
    model += [PlannedTensor("head", (4096, 30_938), ready=0.03)]
    table = plan(model, described(25e9), [DGC, DRAGONN], min_elements=1024)
    assert [row.name for row in table.rows if row.spec == "dragonn"] == ["head"]
    assert {row.spec for row in table.rows} == {"none", "dragonn"}
    assert table.step < table.dense_step / 3
    assert table.step < plan(model, described(25e9), [DGC], min_elements=1024).step


@pytest.mark.parametrize("rate", [1e9, 25e9, 100e9])
def test_a_tensor_is_compressed_if_its_codec_takes_less_than_the_wire_would(rate):
    """Equation 1: T_comp < T_full - T_spr, for each size by itself."""
    job = described(rate)
    for numel in (1 << power for power in range(8, 27)):
        sparse = min(route("dragonn", way, count, numel, job).seconds for way in LISTED for count in (1, 2, 4, 8, 16))
        dense = min(
            native_seconds(4 * numel, job),
            *(route("none", way, count, numel, job).seconds for way in DENSE.strategies for count in (1, 2, 4, 8, 16)),
        )
        if abs(sparse - dense) > 0.1 * dense:
            assert compressed(numel, job) == (sparse < dense), numel


def test_the_slower_the_link_the_smaller_the_tensors_that_are_compressed():
    sizes = [1 << power for power in range(8, 27)]
    chosen = [[compressed(numel, described(rate)) for numel in sizes] for rate in (100e9, 25e9, 1e9)]
    for each in chosen:
        assert all(each[each.index(True) + 2 :])  # from some size on; where both take as long, it may be either
        assert not each[0]
    assert chosen[0].index(True) > chosen[1].index(True) > chosen[2].index(True)


@pytest.mark.parametrize(
    ("world_size", "overlap", "exact", "any_way"),
    [
        (2, 1.0, "allgather", "allgather"),
        (4, 0.0, "allgather", "scatter_reduce"),
        (4, 1.0, "sparse_reduce", "sparse_reduce"),
        (64, 0.0, "sparse_reduce", "scatter_reduce"),
        (64, 0.5, "sparse_reduce", "scatter_reduce"),
        (64, 1.0, "sparse_reduce", "sparse_reduce"),
    ],
)
def test_balanced_sums_are_chosen_for_equal_positions_or_where_exact_sums_are_to_grow_little(
    world_size: int, overlap: float, exact: str, any_way: str
) -> None:
    """At 100 Mb/s. `scatter_reduce` always sends K pairs twice, because owners encode sums again."""
    job = replace(described(1e8, world_size), overlap=overlap)
    model, found = [PlannedTensor("w", (4096, 1024))], []
    for ways in (("allgather", "sparse_reduce"), LISTED):
        (row,) = plan(model, job, [RankedCompressor("dragonn", ways)], min_elements=0, min_gain=0).rows
        assert row.spec == "dragonn"
        found.append(row.strategy)
    assert found == [exact, any_way]


SMALL = [PlannedTensor(f"blocks.{index}.weight", (24, 48)) for index in range(128)]


def many_small(rate, shared):
    """Four ranks, on which a call takes 60 us, and a tensor of a fusion group saves a `shared` part of that."""
    call, job = LinearCost(60e-6, 1e-9), costs(4, rate, task=5e-5)
    saved = {f"shared_{name}": shared * call.fixed for name in ("encode", "decode", "merge")}
    dragonn = CodecCosts(call, call, call, LinearCost(4, 0.005), **saved)
    return replace(job, codecs={"none": job.codecs["none"], "dragonn": dragonn}, frame_bytes=0)


@pytest.mark.parametrize(("rate", "shared", "sparse"), [(1e8, 0.95, 128), (1e9, 0.95, 128), (1e9, 0, 0)])
def test_many_small_tensors_are_sparsified_if_one_call_for_all_of_them_is_cheap(rate, shared, sparse):
    job, method = many_small(rate, shared), RankedCompressor("dragonn", ("allgather",))
    rows = plan(SMALL, job, [method], min_elements=0, native=()).rows
    assert sum(row.spec == "dragonn" for row in rows) == sparse
    # The simulator runs the synchronizer's own operations, with the same costs: it prefers the same plan.
    model = SimulatedModel([SimulatedGradient(each.name, each.shape) for each in SMALL], bucket_bytes=1e9)
    cluster = Cluster(ranks=4, link=SimulatedLink.measured(job.slowest))
    every, none = (
        step(model, Plan({"?*": method}, strategy=strategy), cluster, job).seconds
        for method, strategy in (("dragonn", "allgather"), ("none", "ring"))
    )
    assert (every < none) == bool(sparse)


def test_small_tensors_that_stay_dense_travel_in_one_batch_with_vectors():
    model = [*SMALL, PlannedTensor("norm", (128,)), PlannedTensor("head", (4096, 4096))]
    rows = plan(model, many_small(1e9, 0), [DRAGONN], native=()).rows
    assert {(row.spec, row.strategy, row.batched) for row in rows[:-1]} == {("none", rows[0].strategy, True)}
    assert rows[-1].spec == "dragonn" and not rows[-1].batched


def test_tensors_of_which_a_sparsifier_keeps_too_few_are_left_to_others():
    job = described(1e7)
    model = [PlannedTensor("conv", (64, 27)), PlannedTensor("fc", (500, 64))]
    assert (DRAGONN.min_elements, RankedCompressor.of("topk", LISTED).min_elements) == (16_000, 1_600)
    assert [row.spec for row in plan(model, job, [DRAGONN]).rows] == ["none", "dragonn"]
    assert [row.spec for row in plan(model, job, [DRAGONN], min_elements=0).rows] == ["dragonn", "dragonn"]
    assert {row.spec for row in plan(model, job, [RankedCompressor("dragonn", LISTED)]).rows} == {"dragonn"}
    other = replace(job, codecs=job.codecs | {"onebit": costs().codecs["bit"]})
    rows = plan(model, other, [RankedCompressor.of("onebit", ("allgather",)), DRAGONN]).rows
    assert [row.spec for row in rows] == ["onebit", "dragonn"]
