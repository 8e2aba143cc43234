"""Tensor selection of DRAGONN (section 4.2) by the planner's one model: which tensors sparsifying pays for."""

from dataclasses import replace

import pytest

from gradwire.planner import PlannedTensor, plan
from gradwire.planner.closed_forms import native_seconds, route
from gradwire.planner.costs import CodecCosts, LinearCost
from gradwire.planner.fidelity import LISTED, RankedCompressor, methods
from tests.planner.machines import costs

DRAGONN, DGC = RankedCompressor("dragonn", LISTED), RankedCompressor("dgc", LISTED)
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
    model += [PlannedTensor("head", (4096, 30_938), ready=0.02)]
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
            *(route("none", way, 1, numel, job).seconds for way in ("ring", "scatter_reduce", "allgather")),
        )
        if abs(sparse - dense) > 0.1 * dense:
            assert compressed(numel, job) == (sparse < dense), numel


def test_the_slower_the_link_the_smaller_the_tensors_that_are_compressed():
    sizes = [1 << power for power in range(8, 27)]
    chosen = [[compressed(numel, described(rate)) for numel in sizes] for rate in (100e9, 25e9, 1e9)]
    for each in chosen:
        assert each == sorted(each)  # from some size on
        assert each[-1]
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
