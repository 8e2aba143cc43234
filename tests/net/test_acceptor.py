"""A process that is out of descriptors rests before it accepts again, says so once, and then takes who has waited."""

from __future__ import annotations

import errno
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import pytest

from gradwire.net.handshake import GroupMember, JobKey
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.net.rendezvous import Deadline, Meeting
from gradwire.net.tcp import TcpTransport
from gradwire.wire.frame import Header

KEY = JobKey(bytes(32))
WAIT = timedelta(seconds=20)
LEAST_REST_SECONDS = 0.1
SHORT = 2
"""Attempts for which there is no descriptor."""


class Scarce(socket.socket):
    """A listening socket of a system that has no descriptor for the first callers."""

    def __init__(self) -> None:
        super().__init__(socket.AF_INET)
        self.attempts: list[float] = []
        self.bind(("127.0.0.1", 0))
        self.listen()

    def accept(self) -> tuple[socket.socket, object]:
        self.attempts.append(time.monotonic())
        if len(self.attempts) <= SHORT:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()

    def assert_rested(self, caplog: pytest.LogCaptureFixture) -> None:
        assert len(self.attempts) > SHORT
        rests = [after - before for before, after in zip(self.attempts[:SHORT], self.attempts[1:])]
        assert min(rests) > LEAST_REST_SECONDS, rests
        [message] = caplog.messages
        assert "ulimit -n" in message


class Owner:
    """Hears who has joined."""

    def __init__(self) -> None:
        self.peers: queue.SimpleQueue[int] = queue.SimpleQueue()

    def admit(self, peer: int, header: Header) -> None:
        """Whatever it is."""

    def joined(self, peer: int) -> None:
        self.peers.put(peer)

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        """Nothing to do."""

    def left(self, peer: int, error: object) -> None:
        """Nothing to do."""


@pytest.fixture
def listener(caplog: pytest.LogCaptureFixture) -> Iterator[Scarce]:
    with caplog.at_level(logging.WARNING, "gradwire"), Scarce() as made:
        yield made


def test_an_endpoint_rests(listener: Scarce, caplog: pytest.LogCaptureFixture) -> None:
    there, here = Owner(), Owner()
    server = ReconnectingEndpoint(
        GroupMember("job", 1, 2, 5), KEY, there, timeout=WAIT, listener=listener, callers=frozenset({0})
    )
    worker = ReconnectingEndpoint(
        GroupMember("job", 0, 2, 5), KEY, here, timeout=WAIT, call=(1, listener.getsockname())
    )
    server.start()
    worker.start()
    assert there.peers.get(timeout=WAIT.total_seconds()) == 0
    worker.close()
    server.close()
    listener.assert_rested(caplog)


def test_a_mesh_rests(listener: Scarce, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        addresses = [listener.getsockname(), other.getsockname()]
        found: dict[int, TcpTransport] = {}

        def build(rank: int, mine: socket.socket) -> None:
            meeting = Meeting(GroupMember("job", rank, 2, 5), KEY, addresses)
            found[rank] = TcpTransport(meeting, mine, Deadline(WAIT), timeout=WAIT)

        threads = [threading.Thread(target=build, args=each) for each in enumerate((listener, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(found) == {0, 1}
    for transport in found.values():
        transport.abort("the test has ended")
    listener.assert_rested(caplog)
