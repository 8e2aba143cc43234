"""Endpoints: peers that come, go, and come again; unauthenticated peers; keys."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import resource
import socket
import threading
import time
from datetime import timedelta

import numpy as np
import pytest

from gradwire.core.errors import FrameError, OptionError, PeerFailedError, PeerLostError, PeerTimeoutError, SyncError
from gradwire.net.handshake import GroupMember, JobKey
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.wire.frame import FrameKind, Header
from tests.forks import forks

from . import forking

SERVER, EPOCH = 3, 5
KEY = JobKey(bytes(32))
WAIT = 20.0
EMPTY = np.empty(0, np.uint8)


class Owner:
    def __init__(self) -> None:
        self.events: queue.Queue[tuple] = queue.Queue()
        self.refuse = False
        self.refuse_body = b""
        self.greet = lambda: None

    def admit(self, peer, header) -> None:
        if self.refuse:
            raise FrameError("not wanted")

    def joined(self, peer) -> None:
        self.greet()
        self.events.put(("joined", peer))

    def deliver(self, peer, header, body) -> None:
        if self.refuse_body and body.tobytes() == self.refuse_body:
            raise FrameError("not wanted")
        self.events.put(("frame", peer, header.round, body.tobytes()))

    def left(self, peer, error) -> None:
        self.events.put(("left", peer, error))

    def failed(self, error) -> None:
        self.events.put(("failed", error))

    def hear(self, kind):
        deadline = time.monotonic() + WAIT
        while (left := deadline - time.monotonic()) > 0:
            event = self.events.get(timeout=left)
            if event[0] == kind:
                return event
        raise AssertionError(f"no {kind}")


@pytest.fixture
def endpoints():
    made = []

    def make(rank: int, port: int | None = None, key: JobKey = KEY, timeout: float = 10.0):
        owner, member = Owner(), GroupMember("job", rank, SERVER + 1, EPOCH)
        limit = timedelta(seconds=timeout)
        if rank == SERVER:
            listener = socket.create_server(("127.0.0.1", port or 0))
            found = listener.getsockname()[1]
            endpoint = ReconnectingEndpoint(
                member, key, owner, timeout=limit, listener=listener, callers=frozenset(range(SERVER))
            )
            made.append(endpoint)
            endpoint.start()
            return endpoint, owner, found
        endpoint = ReconnectingEndpoint(member, key, owner, timeout=limit, call=(SERVER, ("127.0.0.1", port)))
        made.append(endpoint)
        endpoint.start()
        return endpoint, owner

    yield make
    for endpoint in made:
        endpoint.close()


def frame(sender: int, round_: int = 0) -> Header:
    return Header(FrameKind.PAYLOAD, sender=sender, epoch=EPOCH, round=round_)


def test_frames_go_both_ways(endpoints):
    server, there, port = endpoints(SERVER)
    worker, here = endpoints(1, port)
    here.hear("joined")
    assert there.hear("joined") == ("joined", 1)
    big = np.arange(3_000_000, dtype=np.uint32).view(np.uint8)
    assert worker.send(SERVER, frame(1, 1), big)
    assert worker.send(SERVER, frame(1, 2), np.arange(3, dtype=np.uint8))
    assert there.hear("frame") == ("frame", 1, 1, big.tobytes())
    assert there.hear("frame") == ("frame", 1, 2, bytes([0, 1, 2]))
    assert server.send(1, frame(SERVER, 3), big)
    assert here.hear("frame")[3] == big.tobytes()
    assert not server.send(2, frame(SERVER), big)  # who is not there


@pytest.mark.parametrize("kind", [TypeError, SystemExit])
def test_an_exception_on_its_thread_is_told_to_the_owner_and_to_all_peers(endpoints, kind):
    def fail(*_):
        raise kind("not callable")

    server, there, port = endpoints(SERVER)
    worker, here = endpoints(1, port)
    here.hear("joined")
    there.deliver = fail
    worker.send(SERVER, frame(1, 1), EMPTY)
    _, error = there.hear("failed")
    assert isinstance(error, SyncError)
    assert isinstance(error.__cause__, kind)
    end = here.hear("left")[2]
    assert isinstance(end, PeerFailedError)
    assert "not callable" in str(end)
    assert not server.send(1, frame(SERVER, 1), EMPTY)


def test_a_goodbye_is_no_error(endpoints):
    _, there, port = endpoints(SERVER)
    worker, here = endpoints(0, port)
    here.hear("joined")
    worker.send(SERVER, frame(0, 7), np.zeros(1_000_000, np.uint8))
    worker.close()
    assert there.hear("frame")[2] == 7
    assert there.hear("left") == ("left", 0, None)


def test_a_reason_arrives(endpoints):
    server, there, port = endpoints(SERVER)
    _, here = endpoints(0, port)
    there.hear("joined")
    server.dismiss(0, "another model")
    error = here.hear("left")[2]
    assert isinstance(error, PeerFailedError)
    assert "another model" in str(error)


def test_a_connection_begins_with_what_its_owner_says_when_it_joins(endpoints):
    server, there, port = endpoints(SERVER)
    worker, here = endpoints(1, port)
    here.hear("joined")
    sent = []

    def greet():
        other = threading.Thread(target=lambda: sent.append(worker.send(SERVER, frame(1, 9), EMPTY)))
        other.start()
        other.join()
        sent.append(worker.send(SERVER, frame(1, 1), EMPTY))

    here.greet = greet
    there.hear("joined")
    server.dismiss(1, "once more")
    here.hear("joined")
    assert worker.send(SERVER, frame(1, 2), EMPTY)
    assert [there.hear("frame")[2] for _ in range(2)] == [1, 2]
    assert sent == [False, True]


def test_what_is_meant_for_one_connection_does_not_reach_the_next(endpoints):
    server, there, port = endpoints(SERVER)
    endpoints(1, port)
    there.hear("joined")
    before = server.connection(1)
    _, second = endpoints(1, port)
    there.hear("joined")
    second.hear("joined")
    server.dismiss(1, "an older process", before)
    assert not server.send(1, frame(SERVER, 1), EMPTY, before)
    assert server.send(1, frame(SERVER, 2), EMPTY, server.connection(1))
    assert second.hear("frame")[2] == 2
    assert second.events.empty()


def test_a_peer_that_is_paused_is_not_read_and_not_given_up(endpoints):
    server, there, port = endpoints(SERVER, timeout=1.0)
    worker, here = endpoints(1, port)
    there.hear("joined")
    here.hear("joined")
    server.pause(1, True)
    for round_ in range(3):
        worker.send(SERVER, frame(1, round_), np.zeros(1_000_000, np.uint8))
    with pytest.raises(queue.Empty):
        there.events.get(timeout=1.5)
    server.pause(1, False)
    assert [there.hear("frame")[2] for _ in range(3)] == [0, 1, 2]


def test_a_worker_without_a_descriptor_for_a_connection_calls_again(endpoints):
    _, _, port = endpoints(SERVER)
    owner, member = Owner(), GroupMember("job", 2, SERVER + 1, EPOCH)
    worker = ReconnectingEndpoint(member, KEY, owner, timeout=timedelta(seconds=10), call=(SERVER, ("127.0.0.1", port)))
    free = os.dup(0)
    os.close(free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        worker.start()
        until = time.monotonic() + WAIT
        while not worker.problem and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    try:
        assert worker.problem == os.strerror(errno.EMFILE)
        owner.hear("joined")
    finally:
        worker.close()


def test_a_server_that_comes_back_is_called_again(endpoints):
    first, there, port = endpoints(SERVER)
    _, here = endpoints(2, port)
    here.hear("joined")
    there.hear("joined")
    with first._lock:  # as a kill: connections end without a word
        for link in first._links.values():
            link.socket.shutdown(socket.SHUT_RDWR)
    assert isinstance(here.hear("left")[2], PeerLostError)
    here.hear("joined")


def test_a_second_connection_of_a_peer_takes_the_place_of_the_first(endpoints):
    _, there, port = endpoints(SERVER)
    _, first = endpoints(1, port)
    first.hear("joined")
    there.hear("joined")
    _, second = endpoints(1, port)
    second.hear("joined")
    assert "connected again" in str(there.hear("left")[2])
    there.hear("joined")


def test_a_refused_frame_costs_its_sender_alone(endpoints):
    _, there, port = endpoints(SERVER)
    bad, bad_owner = endpoints(1, port)
    good, good_owner = endpoints(0, port)
    for owner in (there, there, bad_owner, good_owner):
        owner.hear("joined")
    there.refuse = True
    bad.send(SERVER, frame(1), np.zeros(1, np.uint8))
    assert "not wanted" in str(there.hear("left")[2])
    assert "not wanted" in str(bad_owner.hear("left")[2])
    there.refuse = False
    good.send(SERVER, frame(0, 4), np.zeros(1, np.uint8))
    assert there.hear("frame")[2] == 4


def test_a_frame_that_its_owner_cannot_read_costs_its_sender_alone(endpoints):
    _, there, port = endpoints(SERVER)
    there.refuse_body = b"nonsense"
    bad, bad_owner = endpoints(1, port)
    good, good_owner = endpoints(0, port)
    for owner in (there, there, bad_owner, good_owner):
        owner.hear("joined")
    bad.send(SERVER, frame(1), np.frombuffer(there.refuse_body, np.uint8))
    assert "not wanted" in str(there.hear("left")[2])
    assert "not wanted" in str(bad_owner.hear("left")[2])
    good.send(SERVER, frame(0, 4), np.zeros(1, np.uint8))
    assert there.hear("frame")[2] == 4


def test_silence_is_an_error(endpoints):
    _, there, port = endpoints(SERVER, timeout=1.0)
    worker, here = endpoints(1, port)
    here.hear("joined")
    there.hear("joined")
    with worker._lock:  # its thread can say nothing
        assert isinstance(there.hear("left")[2], PeerTimeoutError)


def test_a_forked_child_is_refused_and_does_not_hide_the_death_of_its_parent(endpoints):
    _, there, port = endpoints(SERVER, timeout=4.0)
    line, theirs = forks.Pipe()
    member = GroupMember("job", 1, SERVER + 1, EPOCH)
    worker = forks.Process(target=forking.main, args=(theirs, member, SERVER, port))
    worker.start()
    theirs.close()
    with line:
        there.hear("joined")
        assert line.poll(WAIT)
        assert "Connect after forking" in line.recv()
        worker.kill()
        assert isinstance(there.hear("left")[2], PeerLostError)  # the connection closed: the child holds no copy
    worker.join()
    worker.close()


def test_unauthenticated_peers_do_not_get_in(endpoints):
    _, there, port = endpoints(SERVER)
    wrong_key, out = endpoints(1, port, key=JobKey(bytes([1]) * 32))
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        raw.settimeout(WAIT)
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(4096) == b""
    _, here = endpoints(0, port)
    here.hear("joined")
    assert there.hear("joined") == ("joined", 0)
    assert out.events.empty()
    assert there.events.empty()
    until = time.monotonic() + WAIT
    while not wrong_key.problem and time.monotonic() < until:
        time.sleep(0.01)
    assert wrong_key.problem


def test_a_short_timeout_is_refused(endpoints):
    with pytest.raises(OptionError, match="at least 1 s"):
        endpoints(0, 1, timeout=0.5)
