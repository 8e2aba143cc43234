"""Costs: lines and curves through measurements, and the file they are kept in."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import Curve, LinearCost

sizes = st.lists(st.integers(1, 10**9), min_size=2, max_size=8, unique=True)
parts = st.floats(1e-12, 1e-3)

NONE = CodecCosts(LinearCost(1e-6, 1e-10), LinearCost(1e-6, 1e-10), LinearCost(0, 1e-10), LinearCost(0, 4))
LANES = CodecCosts(*[LinearCost(1e-6, 1e-10)] * 4, *[LinearCost(1e-6, 1e-10)] * 5)


def costs(**changes):
    given = {"world_size": 4, "links": (LinkCosts(1e-4, 8e-9),), "codecs": {"none": NONE, "int8shared": LANES}}
    return Costs(**given | changes)


@given(sizes, parts, parts)
def test_a_fit_finds_the_line_that_made_its_points(xs, fixed, slope):
    ys = [fixed + slope * x for x in xs]
    found = LinearCost.fit(xs, ys)
    assert [found(x) for x in xs] == pytest.approx(ys, rel=1e-3)


@given(sizes, st.lists(parts, min_size=8, max_size=8))
def test_a_fit_is_never_negative_and_no_neighbor_is_better(xs, ys):
    ys = ys[: len(xs)]
    found = LinearCost.fit(xs, ys)
    assert found.fixed >= 0
    assert found.slope >= 0

    def error(fixed, slope):
        return sum((1 - (fixed + slope * x) / y) ** 2 for x, y in zip(xs, ys))

    best = error(found.fixed, found.slope)
    for fixed, slope in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)):
        assert error(found.fixed * fixed, found.slope * slope) >= best * (1 - 1e-6) - 1e-9


def test_a_fit_weighs_small_sizes_as_much_as_large_ones():
    found = LinearCost.fit([1, 10, 10**6, 10**7], [2e-6, 2e-6, 2.2e-3, 1.8e-2])
    assert found(1) == pytest.approx(2e-6, rel=0.2)
    assert found(10**7) == pytest.approx(2e-2, rel=0.2)


def test_tensors_of_a_fusion_group_pay_once_for_what_they_share():
    line, curve = LinearCost(5e-5, 1e-9), Curve(((1000, 6e-5), (2000, 7e-5)))
    codec = CodecCosts(line, curve, line, LinearCost(0, 4), shared_encode=4e-5, shared_decode=6.5e-5)
    assert codec.fused(1) == codec
    four = codec.fused(4)
    assert four.encode(1000) == pytest.approx(line(1000) - 3e-5)
    assert four.decode(1000) == pytest.approx(6e-5 - 0.75 * 6.5e-5)
    assert four.merge(1000) == line(1000)
    assert codec.fused(1000).decode(1000) == 0  # not below
    assert four.payload_bytes == codec.payload_bytes
    with pytest.raises(OptionError, match="Shared seconds must be finite numbers"):
        CodecCosts(line, line, line, line, shared_merge=-1.0)


@pytest.mark.parametrize(
    ("xs", "ys"), [([1], [1]), ([1, 1], [1, 2]), ([1, 2], [1]), ([1, 2], [0, 1]), ([1, 2], [1, float("nan")])]
)
def test_nonsense_is_refused(xs, ys):
    for make in (LinearCost.fit, Curve.through):
        with pytest.raises(OptionError, match="Measure at least a small and a large size"):
            make(xs, ys)


@given(sizes, st.lists(parts, min_size=8, max_size=8), st.floats(0, 1e10), st.floats(0, 1e10))
def test_a_curve_never_falls_and_is_never_above_what_was_measured(xs, ys, a, b):
    ys = ys[: len(xs)]
    curve = Curve.through(xs, ys)
    low, high = sorted((a, b))
    assert 0 <= curve(low) <= curve(high) * (1 + 1e-9)
    for x, y in zip(xs, ys):
        assert curve(x) <= y * (1 + 1e-9)


def test_a_curve_goes_through_its_points_and_on():
    curve = Curve.through([100, 10, 1000], [20, 10, 1000])
    assert [curve(x) for x in (10, 55, 100, 550, 1000, 1900)] == pytest.approx([10, 15, 20, 510, 1000, 1980])
    assert curve(1) == pytest.approx(9)
    assert Curve(((100, 1), (200, 101)))(1) == 0


def test_a_curve_out_of_order_is_refused():
    for points in (((1, 1),), ((2, 1), (1, 2)), ((1, 2), (2, 1))):
        with pytest.raises(OptionError, match=r"Call Curve\.through"):
            Curve(points)


def test_a_link_is_alpha_and_beta():
    link = LinkCosts(0.5, 2.0, per_message=0.25)
    assert link(3) == 6.75
    assert link.busy(3) == 6.25


def test_the_slowest_link_has_the_worst_of_each():
    slow, far = LinkCosts(1e-4, 8e-9), LinkCosts(1e-2, 1e-9, 1e-5)
    found = costs(world_size=2, links=(slow, far))
    assert found.slowest == LinkCosts(1e-2, 8e-9, 1e-5)


def test_a_file_gives_back_what_was_written():
    curve = Curve(((1, 1e-6), (1000, 2e-6)))
    codecs = {
        "none": NONE,
        "threelc:sparsity=1.5": CodecCosts(curve, curve, curve, LinearCost(0, 0.2), shared_merge=1e-6),
        "lanes": LANES,
    }
    links = (LinkCosts(1e-4, 8e-9), LinkCosts(1e-4, 1e-9))
    found = costs(world_size=2, links=links, codecs=codecs, native=LinkCosts(0, 1e-9), add=curve, made_by="a test",
                  ranks_per_node=2, within=LinkCosts(1e-6, 1e-10))  # fmt: skip
    assert Costs.from_json(found.to_json()) == found


def test_a_file_with_strange_entries_is_refused():
    document = json.loads(costs().to_json())
    changes = {
        "not a gradwire costs file": {"format": "gradwire plan"},
        "version 4, and this release of gradwire reads version 3. Make the file again": {"version": 4},
        "has unknown speed (in costs). Correct the file": {"speed": 1},
        "Pass links=": {"links": []},
        "links must be a list, not 5": {"links": 5},
        "world_size is a whole number of ranks, not 4.0": {"world_size": 4.0},
        "a list of pairs, not [[1, 2, 3]] (in none, encode)": {
            "codecs": {"none": document["codecs"]["none"] | {"encode": {"points": [[1, 2, 3]]}}}
        },
        "at least 0, not 'a'": {
            "codecs": {"none": document["codecs"]["none"] | {"encode": {"points": [["a", 1], [2, 2]]}}}
        },
        "finite numbers": {"task": -1},
        "finite numbers of at least 0, not None": {"overlap": None},
        "a share from 0 to 1, not 2": {"overlap": 2},
        "lacks seconds_per_byte (in links)": {"links": [{"latency": 1}]},
        "in none, encode": {"codecs": {"none": document["codecs"]["none"] | {"encode": {"fixed": 1}}}},
        "Pass all of them, or none": {
            "codecs": {"none": document["codecs"]["none"] | {"accumulate": {"fixed": 1, "slope": 1}}}
        },
        'costs of "none"': {"codecs": {}},
        "a codec per name, not [1]": {"codecs": [1]},
    }
    for message, change in changes.items():
        with pytest.raises(OptionError) as caught:
            Costs.from_json(json.dumps(document | change))
        assert message in str(caught.value)
    with pytest.raises(OptionError, match=r"JSON, and this is not: .* make it again"):
        Costs.from_json("costs")


@pytest.mark.parametrize("wrong", [{"ranks_per_node": 3, "within": LinkCosts(0, 0)}, {"ranks_per_node": 2},
                                   {"within": LinkCosts(0, 0)}, {"ranks_per_node": 0}])  # fmt: skip
def test_nodes_of_equal_size_have_a_link_within(wrong):
    with pytest.raises(OptionError, match="ranks"):
        costs(world_size=4, **wrong)


def test_a_compressor_without_costs_lists_those_with():
    with pytest.raises(UnknownNameError, match="int8shared, none"):
        costs().codec("onebit")
