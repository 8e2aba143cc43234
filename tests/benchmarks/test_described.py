"""Costs of the GPU that is not at hand follow from counts and assumptions."""

import pytest
from benchmarks.planning import described, device_counts
from benchmarks.planning.device_counts import Counts

from gradwire.core.errors import OptionError
from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import Curve, LinearCost

pytestmark = pytest.mark.ci  # the interpreter is slow

DENSE = CodecCosts(Curve(((1e3, 1e-6), (1e6, 1e-3))), LinearCost(1e-6, 1e-9), LinearCost(0.0, 1e-9), LinearCost(0.0, 4))
HOST = Costs(1, (LinkCosts(0.0, 0.0),), {"none": DENSE}, task=3e-6, frame=LinearCost(7e-6, 1e-10), made_by="a test")


def test_costs_are_a_valid_document() -> None:
    costs = described.gpu_costs("onebit", "dgc", host=HOST, ranks=4)
    assert Costs.from_json(costs.to_json()) == costs
    assert set(costs.codecs) == {"none", "onebit", "dgc"}
    assert "a test" in costs.made_by


def test_tasks_and_frames_are_those_of_the_host_and_frames_have_no_bytes() -> None:
    costs = described.gpu_costs(host=HOST, ranks=4)
    assert costs.task == HOST.task
    assert costs.frame == LinearCost(7e-6, 0.0)


def test_dense_tensors_cross_the_bus_both_ways() -> None:
    dense = described.gpu_costs(host=HOST, ranks=4).codec("none")
    for found, before in ((dense.encode, DENSE.encode), (dense.decode, DENSE.decode)):
        assert found(1e6) - before(1e6) == pytest.approx(4e6 / 12e9)
    assert dense.merge == DENSE.merge


def test_every_call_takes_its_time() -> None:
    counts = Counts(launches=4, operations=20, views=17, copies=1, syncs=2, nbytes=LinearCost(0.0, 7.0))
    found = described.seconds(counts)
    assert found.fixed == pytest.approx(40e-6 + 100e-6 + 17e-6 + 7e-6 + 20e-6)
    assert found.slope == pytest.approx(7 / 700e9)


def test_a_codec_with_error_feedback_pays_for_the_residual_and_every_payload_crosses_the_bus() -> None:
    counts = device_counts.counts("onebit")
    found = described.device_costs("onebit", ranks=4)
    body = 8 + (1 << 20) / 8
    bus = 7e-6 + body / 6e9
    assert found.payload_bytes(1 << 20) == body
    assert found.encode(1 << 20) == pytest.approx(described.seconds(counts.encode_with_residual)(1 << 20) + bus)
    assert found.decode(1 << 20) == pytest.approx(described.seconds(counts.decode)(1 << 20) + bus)
    assert found.merge(1 << 20) == pytest.approx(described.seconds(counts.merge)(1 << 20) / 4 + bus)


def test_one_call_merges_the_payloads_of_all_ranks() -> None:
    four, eight = (described.device_costs("onebit", ranks).merge.fixed for ranks in (4, 8))
    assert eight < four
    counts = [device_counts.counts("onebit", ranks).merge.launches for ranks in (4, 8)]
    assert counts == [1, 1]


def test_what_does_not_run_on_a_gpu_has_no_costs() -> None:
    with pytest.raises(OptionError, match="topk has no device code"):
        described.gpu_costs("topk", host=HOST, ranks=4)


def test_links_have_no_headers() -> None:
    assert described.link().header_bytes == 0
