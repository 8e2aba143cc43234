"""Ten thousand connections that prove nothing, and one that does."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from datetime import timedelta

import pytest

from gradwire.net.handshake import GroupMember, JobKey
from gradwire.net.pending import SPARE_CONNECTIONS
from gradwire.net.reconnecting import ReconnectingEndpoint
from tests.net.recorder import until
from tests.net.test_acceptor import Owner

KEY, WAIT = JobKey(bytes(32)), timedelta(seconds=20)
CONNECTIONS, HELD = 10_000, 500
IP_BIND_ADDRESS_NO_PORT = 24


def half_open(address: tuple[str, int], source: str) -> socket.socket:
    """A connection that is never used."""
    made = socket.socket()
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
    made.bind((source, 0))
    with contextlib.suppress(BlockingIOError):
        made.connect(address)
    return made


@pytest.mark.ci
@pytest.mark.parametrize("num_sources", [100, 1])
def test_ten_thousand_half_open_connections(num_sources: int) -> None:
    there, here = Owner(), Owner()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    address = listener.getsockname()
    server = ReconnectingEndpoint(
        GroupMember("job", 1, 2, 5), KEY, there, timeout=WAIT, listener=listener, callers=frozenset({0})
    )
    server.start()
    descriptors = len(os.listdir("/proc/self/fd"))
    held: deque[socket.socket] = deque()
    worker = None
    try:
        for number in range(CONNECTIONS):
            held.append(half_open(address, f"127.0.1.{1 + number % num_sources}"))
            if len(held) > HELD:
                held.popleft().close()
            if number == CONNECTIONS // 2:
                worker = ReconnectingEndpoint(GroupMember("job", 0, 2, 5), KEY, here, timeout=WAIT, call=(1, address))
                worker.start()
            assert len(server._pending._quota) <= SPARE_CONNECTIONS + 2
        assert there.peers.get(timeout=WAIT.total_seconds()) == 0
        assert here.peers.get(timeout=WAIT.total_seconds()) == 1
    finally:
        while held:
            held.popleft().close()
        until(lambda: len(server._pending._accepted) == 0)
        if worker is not None:
            assert len(os.listdir("/proc/self/fd")) <= descriptors + 8  # the worker's own
            worker.close()
        server.close()
