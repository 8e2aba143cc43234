from __future__ import annotations

import threading
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from gradwire.core.errors import FrameError, PeerFailedError, PeerLostError, SyncError
from gradwire.transport.tcp import TcpTransport
from gradwire.wire.frame import HEADER_BYTES

from .recorder import PATIENCE, body, header, start, until


def connect_all(world_size: int, *, timeout: timedelta = PATIENCE, name: str = "test") -> list[TcpTransport]:
    """Connect the ranks of a group that live in threads of this process."""
    store = dist.HashStore()
    found: list[TcpTransport | BaseException | None] = [None] * world_size

    def connect(rank: int) -> None:
        try:
            found[rank] = TcpTransport.connect(store, rank, world_size, timeout=timeout, name=name)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [one for one in found if isinstance(one, BaseException)]
    if errors:
        raise errors[0]
    return found


@pytest.fixture
def group():
    made: list[TcpTransport] = []

    def make(world_size: int, **options) -> list[TcpTransport]:
        made.extend(connect_all(world_size, **options))
        return made

    yield make
    for transport in made:
        transport.abort("the test has ended")


def test_frames_of_all_sizes_arrive_whole_and_in_order(group):
    transports = group(3)
    recorders = [start(transport) for transport in transports]
    sizes = [0, 1, 71, 72, 73, 65_463, 65_464, 65_465, 65_536, 3_000_000, 5]
    for sender in (0, 2):
        for index, size in enumerate(sizes):
            transports[sender].send(1, header(transports[sender], tensor=index), body(size, index))
    seen = {0: 0, 2: 0}
    for _ in range(2 * len(sizes)):
        peer, got, content = recorders[1].frame()
        assert got.tensor == seen[peer]
        np.testing.assert_array_equal(content, body(sizes[got.tensor], got.tensor))
        seen[peer] += 1
    total = sum(sizes) + HEADER_BYTES * len(sizes)
    assert transports[0].sent_bytes == [0, total, 0]
    assert transports[1].received_bytes == [total, 0, total]
    assert transports[0].epoch == transports[1].epoch == transports[2].epoch


def test_many_small_frames_from_many_threads_all_arrive(group):
    transports = group(2)
    recorder = start(transports[1])
    start(transports[0])

    def send(thread: int) -> None:
        for index in range(500):
            transports[0].send(1, header(transports[0], tensor=thread, partition=index), body(thread * 40, index))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    due = [0] * 4
    for _ in range(2000):
        _, got, content = recorder.frame()
        assert got.partition == due[got.tensor]
        np.testing.assert_array_equal(content, body(got.tensor * 40, got.partition))
        due[got.tensor] += 1
    for thread in threads:
        thread.join()


def test_what_is_sent_before_the_peer_starts_is_kept(group):
    transports = group(2)
    start(transports[0])
    transports[0].send(1, header(transports[0]), body(1_000_000))
    recorder = start(transports[1])
    np.testing.assert_array_equal(recorder.frame()[2], body(1_000_000))


def test_close_sends_what_is_queued(group):
    transports = group(2)
    recorders = [start(transport) for transport in transports]
    for index in range(20):
        transports[0].send(1, header(transports[0], tensor=index), body(1_000_000, index))
    transports[0].close()
    for index in range(20):
        np.testing.assert_array_equal(recorders[1].frame()[2], body(1_000_000, index))
    until(lambda: transports[1].departed(0))
    assert recorders[0].failures.empty()
    assert recorders[1].failures.empty()
    transports[1].send(0, header(transports[1]), body(3))
    error = recorders[1].failure()
    assert isinstance(error, PeerLostError)
    assert "closed in good order" in str(error)


def test_abort_tells_the_reason_and_whom_to_blame(group):
    transports = group(3)
    recorders = [start(transport) for transport in transports]
    transports[0].abort("shape of layer 3 differs")
    for rank in (1, 2):
        error = recorders[rank].failure()
        assert isinstance(error, PeerFailedError)
        assert error.rank == 0
        assert "shape of layer 3 differs" in str(error)
    assert recorders[0].failures.empty()


def test_a_refused_frame_fails_both_ends_and_names_the_sender(group):
    def refuse(peer, got):
        raise FrameError(f"Expected tensor 0, got {got.tensor}.")

    sender, receiver = group(2)
    sender_side = start(sender)
    receiver_side = start(receiver, admit=refuse)
    sender.send(1, header(sender, tensor=7), body(10_000_000))
    error = receiver_side.failure()
    assert type(error) is SyncError
    assert error.rank == 0
    assert "Expected tensor 0, got 7." in str(error)
    told = sender_side.failure()
    assert isinstance(told, (PeerFailedError, PeerLostError))
