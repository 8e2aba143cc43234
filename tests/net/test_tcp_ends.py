"""Ends of a group: who leaves, who aborts, and what is left open."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from gradwire.core.errors import (
    PeerFailedError,
    PeerLostError,
)
from gradwire.net.tcp import TcpTransport

from .group import connect_all
from .recorder import PATIENCE, Recorder, body, header, start, until


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
        with suppress(OSError):  # a peer that heard of the first end may have ended this connection itself
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
