"""Steps through an aggregation server against times worked out by hand, and its packets against real ones."""

import json
from dataclasses import replace

import pytest

import gradwire as gw
from gradwire.core.errors import OptionError
from gradwire.planner.curves import FREE, LinearCost
from gradwire.simulate import (
    Cluster,
    SimulatedGradient,
    SimulatedLink,
    SimulatedModel,
    SimulatedServer,
    Straggler,
    step,
)
from gradwire.sync.plan import Plan
from tests.aggregator.served_ranks import NUMEL, PACKET, group_of, take_step
from tests.simulate.costs import costs, model, summed
from tests.sync.local_aggregator import LocalAggregator

RATE, ALPHA = 1e9, 100e-6
PER_BYTE = 8 / RATE
ELEMENTS = 1 << 22
INDICES, SUMS = ELEMENTS // 2, ELEMENTS  # bytes of a rank's 4-bit indices, and of sums of 8 bits
PLAN = Plan("thc", strategy="server", partitions=1)
KNOWN = costs(thc=summed())


def server(link=None, **options):
    costs_of_packets = {"packet": FREE, "statistics_packet": FREE, "rank_packet": FREE, **options}
    return SimulatedServer(link, **costs_of_packets)


def cluster(found, ranks=4, latency=0.0, **options):
    return Cluster(ranks, SimulatedLink(RATE, latency, header_bytes=0), server=found, **options)


def seconds(found, ranks=4, latency=0.0, known=KNOWN):
    return step(model(ELEMENTS), PLAN, cluster(found, ranks, latency), known).seconds


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_copies_for_all_ranks_fill_the_link_of_a_server_like_them(ranks):
    # W results leave by one link; before the first of them, a sixteenth of all indices has to come in.
    expected = ranks * (SUMS + INDICES / 16) * PER_BYTE + 4 * ALPHA
    assert seconds(server(), ranks, ALPHA) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("ranks", [4, 8])
def test_with_multicast_the_indices_of_all_ranks_fill_it(ranks):
    # 1,024 indices to a packet, which has 44 bytes of its own, 24 of its tag, and 42 of Ethernet, IPv4 and UDP.
    packets = ELEMENTS / 1024 * (512 + 44 + 24 + 42) * PER_BYTE
    found = server(multicast=True, mtu=1500)
    # The last sixteenth of the results follows the last indices.
    expected = ranks * packets + SUMS / 16 * PER_BYTE + 4 * ALPHA
    assert seconds(found, ranks, ALPHA) == pytest.approx(expected, rel=0.02)


def test_with_a_server_in_the_switch_only_the_links_of_ranks_count():
    alone = seconds(server(SimulatedLink(None)))
    assert alone == pytest.approx((SUMS + INDICES / 16) * PER_BYTE, rel=0.02)
    # A link as wide as those of all ranks together is nearly as good, however many there are.
    for ranks in (4, 8):
        wide = SimulatedLink(ranks * RATE, header_bytes=0)
        assert seconds(server(wide), ranks) == pytest.approx(alone, rel=0.08)


def test_the_processor_of_a_server_adds_the_packets_of_all_ranks():
    one = 1e-3
    found = server(SimulatedLink(None), packet=LinearCost(one, 0.0))
    number = -(-ELEMENTS // 61_440)
    result = step(model(ELEMENTS), PLAN, cluster(found), KNOWN)
    assert result.seconds == pytest.approx(4 * number * one, rel=0.02)
    assert result.server.processor == pytest.approx(1, abs=0.02)
    # All indices have arrived long before they are added.
    assert result.split["server"] == pytest.approx(result.seconds - INDICES * PER_BYTE, rel=0.02)
    assert sum(result.split.values()) == pytest.approx(result.seconds)


def test_the_transport_of_a_rank_sends_packets_and_takes_results():
    found = server(SimulatedLink(None), rank_packet=LinearCost(0.0, 1e-8), mtu=1500)
    assert seconds(found) == pytest.approx(1e-8 * ELEMENTS, rel=0.02)


def test_one_chunk_is_encoded_while_another_travels():
    known = costs(thc=replace(summed(), encode=LinearCost(0.0, SUMS * PER_BYTE / ELEMENTS)))
    found = cluster(server(SimulatedLink(None)))
    whole, cut = (
        step(model(ELEMENTS), Plan("thc", strategy="server", partitions=number), found, known).seconds
        for number in (1, 16)
    )
    assert whole == pytest.approx(2 * SUMS * PER_BYTE, rel=0.05)
    assert cut == pytest.approx(SUMS * PER_BYTE, rel=0.15)


def test_a_rank_sends_the_bytes_that_a_real_one_reports():
    with group_of(2, "thc", LocalAggregator(), partitions=3) as group:
        group.each(lambda one: take_step(one, 0))
        (reported,) = {one.report().tensors["w"].sent_bytes for one in group.synchronizers}
    simulated = SimulatedModel([SimulatedGradient("w", (NUMEL, 1))])
    plan = Plan({"*": gw.make("thc")}, strategy="server", partitions=3, min_elements=0)
    result = step(simulated, plan, cluster(server(packet_elements=PACKET), ranks=2), KNOWN)
    assert result.sent_bytes == pytest.approx(reported)


def test_small_tensors_travel_between_the_ranks():
    small = SimulatedModel([SimulatedGradient("bias", (4096,))])
    found = step(small, Plan("thc", strategy="server"), cluster(server()), KNOWN)
    assert found == step(small, Plan("thc", strategy="scatter_reduce"), cluster(None), KNOWN)
    assert found.server is None


def test_ranks_of_a_node_share_its_link_to_the_server():
    nodes = cluster(server(SimulatedLink(None)), ranks_per_node=2)
    shared = step(model(ELEMENTS), PLAN, nodes, KNOWN).seconds
    # The link serves messages in order: all indices of one rank, then those of the other, whose sums follow at once.
    assert shared == pytest.approx((INDICES + INDICES / 16 + 2 * SUMS) * PER_BYTE, rel=0.02)


def test_the_slowest_rank_delays_the_sums_of_all():
    late = cluster(server(), stragglers={1: Straggler(delay_seconds=0.5)})
    result = step(model(ELEMENTS), PLAN, late, KNOWN)
    assert all(use.seconds > 0.5 for use in result.ranks)


def test_many_ranks_are_simulated_one_by_one():
    result = step(model(1 << 16), PLAN, cluster(server(), ranks=32), KNOWN)
    assert not result.folded and len(result.ranks) == 32
    with pytest.raises(OptionError, match="Leave fold and bulk out"):
        step(model(1 << 16), PLAN, cluster(server(), ranks=32), KNOWN, fold=True)


def test_a_trace_shows_the_server(tmp_path):
    found = server(packet=LinearCost(1e-6, 0.0))
    step(model(ELEMENTS), PLAN, cluster(found), KNOWN).write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["pid"] == 4}
    assert {"add indices layer0.weight", "answer indices layer0.weight"} < names
    assert any(event["args"].get("name") == "server" for event in events)


def test_what_cannot_be_simulated_is_refused_with_advice():
    with pytest.raises(OptionError, match=r"server=SimulatedServer\(\)"):
        step(model(ELEMENTS), PLAN, cluster(None), KNOWN)
    with pytest.raises(OptionError, match="Pass mtu=1500"):
        SimulatedServer(multicast=True)
    with pytest.raises(OptionError, match='pass "thc" or "uthc"'):
        Plan("onebit", strategy="server")
