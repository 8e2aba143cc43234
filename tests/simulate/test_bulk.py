"""Batches of messages: what they save, what the coordinator costs, and that its links do not conflict."""

import json

import pytest

from gradwire.core.errors import OptionError
from gradwire.planner.curves import LinearCost
from gradwire.simulate import Bulk, Cluster, SimulatedLink, Straggler, step
from gradwire.sync.plan import Plan
from tests.simulate.costs import costs, model, onebit

RATE = 1e9
SECONDS_A_BYTE = 8 / RATE
ALONE, COORDINATED = Bulk(coordinated=False), Bulk()


def run(tensors, cluster, known=None, bulk=None, strategy="allgather"):
    return step(tensors, Plan("none", strategy=strategy), cluster, known or costs(), fold=False, bulk=bulk)


def link(**options):
    return SimulatedLink(RATE, header_bytes=0, **options)


@pytest.mark.ci
@pytest.mark.parametrize(("bulk", "worse"), [(ALONE, 1.001), (COORDINATED, 1.1)])
def test_large_messages_gain_nothing(bulk, worse):
    # The strategies rotate, so equal chunks meet at no receiver. Greedy matching may leave a link idle at times.
    tensors, cluster = model(*[1 << 22] * 4), Cluster(4, link(latency_seconds=20e-6))
    plain = run(tensors, cluster, strategy="scatter_reduce")
    batched = run(tensors, cluster, bulk=bulk, strategy="scatter_reduce")
    assert 0.999 * plain.seconds <= batched.seconds <= worse * plain.seconds
    assert batched.sent_bytes == plain.sent_bytes


@pytest.mark.parametrize("bulk", [ALONE, COORDINATED])
def test_messages_of_a_batch_take_their_overhead_once(bulk):
    tensors, cluster = model(*[16384] * 50), Cluster(2, link(message_seconds=1e-3))
    plain = run(tensors, cluster)
    assert plain.seconds > 0.05
    # 50 messages of 64 KiB, a batch of 16 at most: the bytes alone take 26 ms.
    batched = run(tensors, cluster, bulk=bulk).seconds
    assert 50 * 65536 * SECONDS_A_BYTE + 4e-3 <= batched < 0.04


def test_the_processor_takes_in_a_batch_as_one_frame():
    tensors, cluster = model(*[16384] * 50), Cluster(2, link())
    known = costs(frame=LinearCost(1e-3, 0.0))
    plain = run(tensors, cluster, known)
    assert plain.seconds >= 2 * 50 * 1e-3
    # Senders make 50 frames as before; what they hold back until a batch is full arrives as few.
    held = Bulk(1 << 20, 0.02, coordinated=False)
    assert 0.05 < run(tensors, cluster, known, held).seconds < 0.08


def test_the_coordinator_takes_its_time_where_nothing_is_saved():
    tensors, cluster = model(16384), Cluster(2, link(latency_seconds=1e-3))
    plain = run(tensors, cluster)
    coordinated = run(tensors, cluster, bulk=COORDINATED)
    # Rank 1 is a latency away from the coordinator: there with the report, back with the plan.
    assert coordinated.seconds == pytest.approx(plain.seconds + 2e-3 + 80e-6, rel=0.02)
    slower = run(tensors, cluster, bulk=Bulk(report_seconds=5e-3))
    assert slower.seconds == pytest.approx(coordinated.seconds + 5e-3 - 50e-6, rel=0.02)


def test_a_message_waits_for_the_threshold_or_the_time_out():
    tensors, cluster = model(16384), Cluster(2, link())
    soon = run(tensors, cluster, bulk=Bulk(1 << 20, 0.0, False))
    waited = run(tensors, cluster, bulk=Bulk(1 << 20, 0.01, False))
    assert waited.seconds == pytest.approx(soon.seconds + 0.01)
    full = run(tensors, cluster, bulk=Bulk(1 << 16, 0.01, False))
    assert full.seconds == pytest.approx(soon.seconds)


def test_coordinated_messages_find_both_links_free(tmp_path):
    # A rank that is late by half a chunk meets others at every receiver.
    late = {1: Straggler(delay_seconds=4e-3)}
    tensors, cluster = model(*[1 << 20] * 3), Cluster(4, link(latency_seconds=20e-6), stragglers=late)

    def longest_wait(bulk):
        result = run(tensors, cluster, bulk=bulk, strategy="scatter_reduce")
        result.write_trace(tmp_path / "trace.json")
        spans = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if "ts" in event]
        left = sorted(span["ts"] for span in spans if span["tid"] == 2)
        came = sorted(span["ts"] for span in spans if span["tid"] == 3)
        assert len(left) == len(came) > 0
        return max(there - here for here, there in zip(left, came)) / 1e6 - 20e-6

    part = 4 * (1 << 18) * 8 / RATE
    assert longest_wait(None) > 0.4 * part
    assert longest_wait(COORDINATED) < 0.05 * part


def test_slots_send_to_one_peer_after_another_at_the_same_cost():
    tensors, cluster = model(*[1 << 20] * 4), Cluster(4, link(latency_seconds=20e-6))
    plain = run(tensors, cluster)
    slots = run(tensors, cluster, bulk=Bulk.slots())
    assert plain.seconds <= slots.seconds < 1.01 * plain.seconds
    assert slots.sent_bytes == plain.sent_bytes


def test_batches_are_the_same_again():
    known = costs(1e-5, onebit=onebit(1e-10, 1e-10))
    sizes, cluster = [16384 * (1 + index % 5) for index in range(20)], Cluster(4, link(latency_seconds=20e-6))
    runs = [step(model(*sizes), "onebit", cluster, known, bulk=COORDINATED) for _ in range(2)]
    assert runs[0] == runs[1]


def test_what_cannot_be_coordinated_is_refused():
    with pytest.raises(OptionError, match="ranks_per_node=1"):
        run(model(16384), Cluster(4, link(), ranks_per_node=2), bulk=COORDINATED)
    with pytest.raises(OptionError, match=r"LinearCost\(seconds, 0\)"):
        run(model(16384), Cluster(4, link()), costs(frame=LinearCost(1e-6, 1e-9)), COORDINATED)
    with pytest.raises(OptionError, match=r"Use Bulk.slots\(\)"):
        Bulk(rotating=True)
    with pytest.raises(OptionError, match="threshold above 0"):
        Bulk(threshold_bytes=0)
