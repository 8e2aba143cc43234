"""Frames between the ranks of a group: whole, in order, and refused where they do not fit."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta

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
from gradwire.net.tcp import TcpTransport
from gradwire.net.transport import Callbacks
from gradwire.wire.frame import FrameKind

from .group import connect_all
from .recorder import PATIENCE, body, header, start, until
from .test_rendezvous import Transcript


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
