from __future__ import annotations

import gc
import os
import queue
import socket
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from gradwire.core.errors import (
    FrameError,
    OptionError,
    PeerFailedError,
    PeerLostError,
    PeerTimeoutError,
    SyncError,
)
from gradwire.net.slots import SlottedTransport
from gradwire.net.tcp import TcpTransport
from gradwire.net.transport import Callbacks
from gradwire.wire.frame import FrameKind

from .recorder import PATIENCE, Recorder, body, header, start, until
from .test_rendezvous import Transcript


def connect_all(
    world_size: int, *, timeout: timedelta = PATIENCE, name: str = "test", mesh: type[TcpTransport] = TcpTransport,
    store: Any = None,
) -> list[TcpTransport]:  # fmt: skip
    """Connect the ranks of a group that live in threads of this process."""
    store = store or dist.HashStore()
    found: list[TcpTransport | BaseException | None] = [None] * world_size

    def connect(rank: int) -> None:
        try:
            found[rank] = mesh.connect(store, rank, world_size, timeout=timeout, name=name)
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


@pytest.fixture(
    params=[
        "checksums",
        pytest.param("time slots", marks=pytest.mark.ci),
        pytest.param("job key", marks=pytest.mark.ci),
    ]
)
def group(request, monkeypatch):
    made: list[TcpTransport] = []
    mesh = SlottedTransport if request.param == "time slots" else TcpTransport
    if request.param == "job key":
        monkeypatch.setenv("GRADWIRE_JOB_KEY", "ab" * 32)

    def make(world_size: int, **options) -> list[TcpTransport]:
        made.extend(connect_all(world_size, mesh=mesh, **options))
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
    total = sum(transports[0]._links[1].frame_bytes(size) for size in sizes)
    assert transports[0].sent_bytes == [0, total, 0]
    assert transports[1].received_bytes == [total, 0, total]
    assert transports[0].epoch == transports[1].epoch == transports[2].epoch


def test_a_given_key_protects_frames_and_stays_out_of_the_store(monkeypatch):
    monkeypatch.setenv("GRADWIRE_JOB_KEY", "ab" * 32)
    transcript = Transcript()
    transports = connect_all(2, store=transcript)
    try:
        assert [transport._links[1 - rank].frame_bytes(0) for rank, transport in enumerate(transports)] == [88, 88]
        assert transcript.written
        assert not any("ab" * 32 in value for value in transcript.written)
    finally:
        for transport in transports:
            transport.abort("the test has ended")


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
    assert "has left the group" in str(error)


def vanish(transport: TcpTransport) -> None:
    """End all connections as the end of the process does."""
    for link in transport._links.values():
        link.socket.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("leave", [TcpTransport.close, vanish])
@pytest.mark.parametrize("needed", [True, False])
def test_who_leaves_fails_those_who_need_it(group, leave, needed):
    transports = group(3)
    recorders = [start(transports[rank], needs=lambda *departure, rank=rank: needed and rank == 0) for rank in range(3)]
    leave(transports[2])
    if needed:
        assert [recorders[rank].failure().rank for rank in (0, 1)] == [2, 2]
        return
    until(lambda: transports[0].departed(2) and transports[1].departed(2))
    transports[0].send(1, header(transports[0]), body(5))
    recorders[1].frame()
    assert recorders[0].failures.empty() and recorders[1].failures.empty()
    transports[0].send(2, header(transports[0]), body(5))
    error = recorders[0].failure()
    assert isinstance(error, PeerLostError)
    assert error.rank == 2
    assert ("has left the group" if leave is TcpTransport.close else "without a goodbye") in str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone counts it")
def test_the_busy_time_of_a_link_outlives_it(group):
    transports = group(2)
    recorders = [start(transport) for transport in transports]
    for round_ in range(50):  # a fast loopback may be busy for less than the kernel's clock can tell
        for index in range(20):
            transports[0].send(1, header(transports[0], round=round_, tensor=index), body(1_000_000, index))
        for _ in range(20):
            recorders[1].frame()
        if before := transports[0].busy_seconds():
            break
    assert before > 0
    transports[1].close()
    until(lambda: transports[0].departed(1))
    assert transports[0].busy_seconds() >= before


class LateSocket:
    """A socket whose `sendmsg` returns once the peer has long answered what it sent."""

    def __init__(self, sock: socket.socket, answered: threading.Event) -> None:
        self.sock = sock
        self.answered = answered

    def sendmsg(self, views) -> int:
        count = self.sock.sendmsg(views)
        assert self.answered.wait(PATIENCE.total_seconds())
        time.sleep(0.2)
        return count

    def __getattr__(self, name: str):
        return getattr(self.sock, name)


def test_a_goodbye_before_send_has_returned_takes_nothing_away(group):
    """The peer may have all it waited for, and be gone, while the sending thread is still in the system call."""
    first, second = group(2)
    answered = threading.Event()
    link = first._links[1]
    link.socket = LateSocket(link.socket, answered)  # before the transport's thread knows the other one
    recorder, other = start(first), start(second)

    def part() -> None:
        other.frame()
        second.close()
        answered.set()

    peer = threading.Thread(target=part)
    peer.start()
    first.send(1, header(first), body(100))
    peer.join()
    until(lambda: first.departed(1))
    first.close()
    assert recorder.failures.empty()


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


def test_abort_may_blame_another_rank(group):
    transports = group(3)
    recorders = [start(transport) for transport in transports]
    transports[0].abort("rank 2 sent nonsense", blame=2)
    assert [recorders[rank].failure().rank for rank in (1, 2)] == [2, 2]


def test_a_fail_callback_that_raises_does_not_keep_the_peers_in_the_dark(group):
    transports = group(3)
    recorder = start(transports[1])
    started = Recorder(transports[0]).callbacks()
    transports[0].start(replace(started, fail=lambda error: 1 / 0))
    start(transports[2])
    transports[2].abort("first")
    assert recorder.failure().rank == 2


@pytest.mark.parametrize("world_size", [4, 9])
def test_every_rank_reaches_every_other(group, world_size):
    transports = group(world_size)
    recorders = [start(transport) for transport in transports]
    for sender in transports:
        for peer in range(world_size):
            if peer != sender.rank:
                sender.send(peer, header(sender), body(100, sender.rank))
    for receiver, recorder in zip(transports, recorders, strict=True):
        found = {peer: content for peer, _, content in (recorder.frame() for _ in range(world_size - 1))}
        assert sorted(found) == [peer for peer in range(world_size) if peer != receiver.rank]
        for peer, content in found.items():
            np.testing.assert_array_equal(content, body(100, peer))


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


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_open():
    for transport in connect_all(3):
        transport.close()
    before = descriptors()
    for turn in range(10):
        transports = connect_all(3)
        recorders = [start(transport) for transport in transports]
        for transport in transports:
            transport.send((transport.rank + 1) % 3, header(transport), body(1000))
        for recorder in recorders:
            recorder.frame()
        threads = [threading.Thread(target=end, args=(transport, turn)) for transport in transports]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert descriptors() == before


def end(transport: TcpTransport, turn: int) -> None:
    transport.abort("enough") if turn % 2 else transport.close()


def test_close_and_abort_may_be_called_again(group):
    transports = group(2)
    recorders = [start(transport) for transport in transports]
    for transport in transports:
        transport.close()
        transport.close()
        transport.abort("too late")
        transport.send(1 - transport.rank, header(transport), body(1))  # no harm
    assert all(recorder.failures.empty() for recorder in recorders)


def test_a_transport_that_was_never_started_ends_too(group):
    transports = group(3)
    recorder = start(transports[0])
    transports[1].send(0, header(transports[1]), body(7))
    recorder.frame()
    for transport in transports[1:]:
        transport.close()
    until(lambda: transports[0].departed(1) and transports[0].departed(2))
    assert recorder.failures.empty()


def test_callbacks_may_send_abort_and_close(group):
    transports = group(3)
    recorder = start(transports[0])
    echo = Callbacks(
        admit=lambda peer, got: None,
        deliver=lambda peer, got, content: (
            transports[1].send(peer, header(transports[1], tensor=got.tensor), content),
            transports[1].close(),
        ),
        fail=lambda error: None,
    )
    transports[1].start(echo)
    transports[0].send(1, header(transports[0], tensor=9), body(5000))
    assert recorder.frame()[1].tensor == 9
    until(lambda: transports[0].departed(1))
    ended = queue.SimpleQueue()
    transports[2].start(
        Callbacks(
            admit=lambda peer, got: None,
            deliver=lambda peer, got, content: None,
            fail=lambda error: (transports[2].abort("the callback's own reason"), ended.put(error)),
        )
    )
    transports[0].abort("first")
    assert isinstance(ended.get(timeout=PATIENCE.total_seconds()), PeerFailedError)


def test_a_sender_learns_when_its_memory_is_free(group):
    sender, receiver = group(2)
    start(sender)
    large, small, sent = body(50_000_000), body(100), queue.SimpleQueue()
    expected = large.copy()
    sender.send(1, header(sender, tensor=0), large, lambda: sent.put("large"))
    sender.send(1, header(sender, tensor=1), small, lambda: sent.put("small"))
    assert sent.empty()  # the kernel does not take so much while nothing is read
    recorder = start(receiver)
    assert sent.get(timeout=PATIENCE.total_seconds()) == "large"
    large.fill(0)
    assert sent.get(timeout=PATIENCE.total_seconds()) == "small"
    np.testing.assert_array_equal(recorder.frame()[2], expected)


def test_a_body_is_received_where_the_callback_says(group):
    sender, receiver = group(2)
    start(sender)
    where, content = np.zeros(300_000, np.uint8), body(300_000)
    recorder = start(receiver, destination=lambda peer, got: where if got.tensor == 1 else None)
    for tensor in (0, 1):
        sender.send(1, header(sender, tensor=tensor), content)
    assert recorder.frame()[2] is not where
    assert recorder.frame()[2] is where
    np.testing.assert_array_equal(where, content)


@pytest.mark.parametrize("which", ["admit", "deliver"])
def test_a_callback_that_raises_ends_the_group_with_an_error(group, which):
    def broken(*arguments):
        raise KeyError("layer 3")

    transports = group(2)
    failures = queue.SimpleQueue()
    callbacks = {
        "admit": lambda peer, got: None,
        "deliver": lambda peer, got, content: None,
        "fail": failures.put,
        which: broken,
    }
    recorder = start(transports[0])
    transports[1].start(Callbacks(**callbacks))
    transports[0].send(1, header(transports[0]), body(1))
    assert "layer 3" in str(failures.get(timeout=PATIENCE.total_seconds()))
    assert isinstance(recorder.failure(), PeerFailedError)


@pytest.mark.parametrize(
    ("peer", "fields", "advice"),
    [
        (0, {}, "Pass another rank"),
        (-1, {}, "Pass another rank"),
        (1, {"kind": FrameKind.ABORT}, "Control frames are the transport's"),
        (1, {"sender": 1}, "Fill both in from the transport"),
        (1, {"epoch": 1}, "Fill both in from the transport"),
    ],
)
def test_a_header_that_is_not_the_callers_is_refused_at_once(group, peer, fields, advice):
    transport = group(2)[0]
    with pytest.raises(ValueError, match=advice):
        transport.send(peer, header(transport, **fields), body(1))


@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_could_not_connect_can_try_again(alone):
    store, found = dist.HashStore(), {}
    with pytest.raises(PeerTimeoutError):
        TcpTransport.connect(store, alone, 2, timeout=timedelta(seconds=0.2), name="test")

    def connect(rank: int) -> None:
        found[rank] = TcpTransport.connect(store, rank, 2, timeout=PATIENCE, name="test")

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0].epoch == found[1].epoch
    for transport in found.values():
        transport.abort("the test has ended")


def test_a_group_of_one_has_nobody_to_meet():
    transport = TcpTransport.connect(dist.HashStore(), 0, 1, timeout=PATIENCE, name="alone")
    recorder = start(transport)
    transport.close()
    assert recorder.failures.empty()


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0), (0, 1 << 17)])
def test_a_rank_outside_the_group_is_refused(rank, world_size):
    with pytest.raises(OptionError, match="rank below world size"):
        TcpTransport.connect(dist.HashStore(), rank, world_size, timeout=PATIENCE, name="test")
