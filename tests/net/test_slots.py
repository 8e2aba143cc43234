"""Order and limits of time slots. What holds for every mesh is tested in `test_tcp` and `test_tcp_faults`."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gradwire.net.slots import SLOT_BYTES, SlottedTransport
from gradwire.net.transport import Callbacks

from .recorder import PATIENCE, body, header, start
from .test_tcp import connect_all

LARGE = 2 * SLOT_BYTES


@pytest.fixture
def group():
    made: list[SlottedTransport] = []

    def make(world_size: int) -> list[SlottedTransport]:
        made.extend(connect_all(world_size, mesh=SlottedTransport))
        return made

    yield make
    for transport in made:
        transport.abort("the test has ended")


def order_of(group: list[SlottedTransport], frames: list[tuple[int, int]]) -> list[int]:
    """The peers of rank 1 by the order in which its frames, (peer, size), have left."""
    sender, left, ended = group[1], [], threading.Event()

    def send(peer: int, size: int) -> None:
        def on_sent() -> None:
            left.append(peer)
            if len(left) == len(frames):
                ended.set()

        sender.send(peer, header(sender), body(size), on_sent)

    def deliver(peer, trigger, content) -> None:
        # On the thread that sends large frames, so that none leaves before all are queued.
        for frame in frames:
            send(*frame)

    for transport in group:
        if transport is not sender:
            start(transport)
    sender.start(Callbacks(admit=lambda peer, header: None, deliver=deliver, fail=lambda error: None))
    group[0].send(1, header(group[0]), body(1))
    assert ended.wait(PATIENCE.total_seconds())
    return left


def test_peers_have_their_slots_in_the_order_of_ranks_after_the_own(group):
    # Slot 3 begins at once, for nothing else waits then; slots 1 and 2 follow.
    assert order_of(group(4), [(0, LARGE), (3, LARGE), (2, LARGE)]) == [0, 2, 3]


def test_a_slot_carries_many_small_frames_of_one_peer_up_to_a_limit(group):
    third = SLOT_BYTES // 3
    frames = [(0, LARGE), *[(2, third)] * 4, *[(3, third)] * 3]
    assert order_of(group(4), frames) == [0, 2, 2, 3, 3, 2, 2, 3]


def test_a_peer_that_takes_nothing_does_not_hold_back_the_others(group):
    transports = group(3)
    start(transports[0])
    transports[0].send(1, header(transports[0]), body(50_000_000))  # more than the kernel holds
    for index in range(3):
        transports[0].send(2, header(transports[0], tensor=index), body(1_000_000, index))
        transports[0].send(1, header(transports[0], tensor=index), body(10, index))
    recorder = start(transports[2])
    for index in range(3):
        _, got, content = recorder.frame()
        assert got.tensor == index
        np.testing.assert_array_equal(content, body(1_000_000, index))
    late = start(transports[1])
    np.testing.assert_array_equal(late.frame()[2], body(50_000_000))
    for index in range(3):
        _, got, content = late.frame()
        assert got.tensor == index
        np.testing.assert_array_equal(content, body(10, index))


def test_frames_of_all_ranks_to_all_ranks_arrive_in_order(group):
    transports = group(4)
    recorders = [start(transport) for transport in transports]
    sizes = [0, 10, 700_000, 100_000, 65_465, 1]

    def send(transport: SlottedTransport) -> None:
        for round in range(10):
            for peer in range(4):
                if peer != transport.rank:
                    transport.send(peer, header(transport, round=round), body(sizes[round % len(sizes)], round))

    threads = [threading.Thread(target=send, args=(transport,)) for transport in transports]
    for thread in threads:
        thread.start()
    for recorder in recorders:
        due = [0] * 4
        for _ in range(30):
            peer, got, content = recorder.frame()
            assert got.round == due[peer]
            np.testing.assert_array_equal(content, body(sizes[got.round % len(sizes)], got.round))
            due[peer] += 1
    for thread in threads:
        thread.join()
