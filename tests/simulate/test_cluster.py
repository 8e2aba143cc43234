"""Packets, shared cores and threads that wake up against closed forms."""

import pytest

from gradwire.core.errors import OptionError
from gradwire.planner.curves import LinearCost
from gradwire.simulate import Bulk, Cluster, SimulatedGradient, SimulatedLink, SimulatedModel, step
from gradwire.sync.plan import Plan
from tests.simulate.costs import costs, model, onebit

RATE = 1e9
ELEMENTS = 1 << 20
NBYTES = 4 * ELEMENTS
SEGMENT, HEADERS = 1448, 66


def seconds(ranks, strategy, link, known=None, cores=None):
    return step(model(ELEMENTS), Plan("none", strategy=strategy), Cluster(ranks, link, cores=cores), known or costs())


def test_packets_carry_headers_and_are_acknowledged():
    # Both directions are full: of 1,448 bytes each carries 66 of headers, and 33 of an acknowledgement back.
    found = seconds(2, "allgather", SimulatedLink(RATE)).seconds
    wire = NBYTES * (1 + 1.5 * HEADERS / SEGMENT) * 8 / RATE
    assert found == pytest.approx(wire, rel=0.002)


def test_acknowledgements_alone_delay_nobody():
    # A small tensor goes to its owner, and the mean back: one direction at a time.
    link = SimulatedLink(RATE)
    result = step(model(1024), Plan("none", strategy="scatter_reduce"), Cluster(2, link), costs())
    message = 4096 * link.seconds_per_byte + link.header_seconds
    assert result.seconds == pytest.approx(2 * message, rel=0.01)


@pytest.mark.parametrize("cores", [1, 2])
def test_ranks_on_shared_cores_wait_for_the_kernels_work_for_all(cores):
    # A frame's bytes cost each end the same; the wire costs nothing.
    per_byte, ranks = 1e-9, 8
    result = seconds(ranks, "allgather", SimulatedLink(None), costs(frame=LinearCost(0.0, per_byte)), cores)
    work = 2 * ranks * (ranks - 1) * NBYTES * per_byte
    assert result.processor_seconds == pytest.approx(work, rel=1e-6)
    assert result.seconds == pytest.approx(work / cores, rel=0.1)


def test_processors_of_all_ranks_count_tasks_and_frames():
    result = seconds(4, "allgather", SimulatedLink(None), costs(1e-3, frame=LinearCost(1e-3, 1e-15)))
    # A rank encodes and decodes once, and sends and receives three frames, with a task for each.
    assert result.processor_seconds == pytest.approx(4 * (2 + 3 + 3 + 6) * 1e-3, rel=1e-3)


def test_a_thread_that_has_waited_takes_a_moment_to_wake():
    wake, latency = 1e-4, 1e-3
    cluster = Cluster(2, SimulatedLink(None, latency), wake_seconds=wake)
    result = step(model(ELEMENTS), Plan("none", strategy="allgather"), cluster, costs())
    # To encode, and again to decode what has arrived; the send follows the encode at once.
    assert result.seconds == pytest.approx(latency + 2 * wake)
    assert result.processor_seconds == pytest.approx(2 * 2 * wake)


def test_a_thread_with_more_to_do_keeps_its_core():
    # Eight ranks with four tensors each on one core: each wakes up once to encode all of its own, and once to decode.
    wake, encode = 1e-3, 1e-4
    known = costs(onebit=onebit(encode=encode / ELEMENTS))
    cluster = Cluster(8, SimulatedLink(None, 1.0), cores=1, wake_seconds=wake)
    result = step(model(*[ELEMENTS] * 4), Plan("onebit", strategy="allgather"), cluster, known)
    encoded = 8 * (wake + 4 * encode)
    assert result.seconds == pytest.approx(1.0 + encoded + 8 * wake, abs=2 * wake)


# -- queues that lose --------------------------------------------------------------------------------------------

WINDOW, TIMEOUT = 4096, 0.2


def shallow(windows):
    return SimulatedLink(RATE, 20e-6, header_bytes=0, queue_bytes=windows * WINDOW, window_bytes=WINDOW)


def synchronize(elements, ranks, strategy, link, bulk=None):
    return step(model(elements), Plan("none", strategy=strategy), Cluster(ranks, link), costs(), bulk=bulk)


@pytest.mark.parametrize("windows", [pytest.param(1, marks=pytest.mark.ci), 2, 3, 7])
def test_a_sender_without_room_at_its_receiver_sends_again_after_a_timeout(windows):
    # Seven ranks send 4 KiB to the owner of the only chunk. It has room for some of them each time.
    result = synchronize(1024, 8, "scatter_reduce", shallow(windows))
    lost = range(7 - windows, 0, -windows)
    assert result.num_lost == sum(lost)
    message = WINDOW * 8 / RATE + 20e-6
    waited = len(lost) * TIMEOUT
    assert waited + 2 * message < result.seconds < waited + 15 * message


def test_later_messages_of_a_connection_wait_for_the_lost_one():
    # Two connections into each rank, with room for one: all five messages of the other wait for one timeout.
    result = step(model(*[1024] * 5), Plan("none", strategy="allgather"), Cluster(3, shallow(1)), costs())
    assert result.num_messages == 5 * 3 * 2
    assert result.num_lost == 3
    assert TIMEOUT < result.seconds < TIMEOUT + 12 * WINDOW * 8 / RATE


def test_a_small_message_makes_no_room_for_a_large_one_behind_it():
    # Two connections into each rank, with room for one window.
    small, large = SimulatedGradient("bias", (256,), 0.0), SimulatedGradient("weight", (64, 1024), 1e-7)
    for gradients in ([large], [small, large]):
        result = step(SimulatedModel(gradients), Plan("none", strategy="allgather"), Cluster(3, shallow(1)), costs())
        assert result.num_lost >= 3


def test_a_deep_queue_changes_nothing():
    deep, endless = shallow(1000), SimulatedLink(RATE, 20e-6, header_bytes=0)
    for strategy in ("ring", "scatter_reduce", "allgather"):
        assert synchronize(ELEMENTS, 6, strategy, deep) == synchronize(ELEMENTS, 6, strategy, endless)


@pytest.mark.ci
def test_slots_leave_room_for_everyone():
    link = shallow(2)
    assert synchronize(ELEMENTS, 6, "allgather", link).num_lost > 0
    assert synchronize(ELEMENTS, 6, "allgather", link, Bulk.slots()).num_lost == 0


def test_queues_that_cannot_be_simulated_are_refused():
    with pytest.raises(OptionError, match="queue_bytes=None"):
        SimulatedLink(RATE, queue_bytes=0)
    with pytest.raises(OptionError, match="ranks_per_node=1"):
        step(model(1024), Plan("none"), Cluster(4, shallow(2), ranks_per_node=2), costs())
