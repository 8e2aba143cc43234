"""Metrics over HTTP: the text, and what becomes of requests that are slow, long, many, or no requests."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from gradwire.core.counts import Count
from gradwire.observe import exposition
from gradwire.observe.exposition import MAX_REQUEST_BYTES, MAX_REQUESTS, MetricsServer, render

COUNTS = [
    Count("workers", "Workers of the job.", 4),
    Count("packets_total", "Packets.", 7, (("kind", "sent"), ("place", 'the "kernel"\\\n'))),
    Count("wait_seconds", "Time\nspent.", 0.25),
    Count("packets_total", "Packets.", 2, (("kind", "late"),)),
]
TEXT = r"""# HELP gradwire_workers Workers of the job.
# TYPE gradwire_workers gauge
gradwire_workers 4.0
# HELP gradwire_packets_total Packets.
# TYPE gradwire_packets_total counter
gradwire_packets_total{kind="sent",place="the \"kernel\"\\\n"} 7.0
gradwire_packets_total{kind="late"} 2.0
# HELP gradwire_wait_seconds Time\nspent.
# TYPE gradwire_wait_seconds gauge
gradwire_wait_seconds 0.25
"""
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
LIMIT = 30.0  # seconds, on a busy machine


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with MetricsServer(("127.0.0.1", 0), lambda: COUNTS) as made:
        yield made


def ask(server: MetricsServer, request: bytes, *, pieces: int = 1) -> bytes:
    """Send bytes and return the answer up to its end."""
    with socket.create_connection(server.address, LIMIT) as sock:
        size = -(-len(request) // pieces)
        with contextlib.suppress(ConnectionError):  # the server may have answered and closed already
            for start in range(0, len(request), size):
                sock.sendall(request[start : start + size])
        return to_end(sock)


def to_end(sock: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(1 << 16):
            answer += part
    return answer


def eventually(true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_text_is_that_of_prometheus() -> None:
    assert render(COUNTS) == TEXT


def test_an_ordinary_client_reads_it(server: MetricsServer) -> None:
    assert server.url == f"http://127.0.0.1:{server.address[1]}/metrics"
    for _ in range(3):
        with urllib.request.urlopen(server.url, timeout=LIMIT) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert answer.read().decode() == TEXT
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(server.url.replace("/metrics", "/"), timeout=LIMIT)


def test_a_request_may_come_in_pieces_and_with_a_query(server: MetricsServer) -> None:
    assert TEXT.encode() in ask(server, REQUEST.replace(b"metrics", b"metrics?name=x"), pieces=7)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/2.0\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00" + bytes(300) + b"\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (4 * MAX_REQUEST_BYTES), b"431"),
    ],
)
def test_what_is_no_request_for_metrics_gets_its_status(server: MetricsServer, request_: bytes, status: bytes) -> None:
    answer = ask(server, request_)
    # After a reset, the client may not see the answer to a request that it has not finished sending.
    assert answer.startswith(b"HTTP/1.1 " + status) or (status == b"431" and not answer)
    assert b"gradwire_workers" not in answer
    assert TEXT.encode() in ask(server, REQUEST), "it goes on"


def test_random_bytes_do_not_end_it(server: MetricsServer) -> None:
    for _ in range(100):
        ask(server, os.urandom(200) + b"\r\n\r\n")
    assert TEXT.encode() in ask(server, REQUEST)


def test_slow_requests_end_at_their_deadline(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "REQUEST_SECONDS", 0.5)
    with socket.create_connection(server.address, LIMIT) as slow:
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - started < LIMIT:  # a byte now and then does not put it off
                slow.sendall(b"x")
                slow.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    if slow.recv(1) == b"":
                        break
        assert time.monotonic() - started < LIMIT
    assert TEXT.encode() in ask(server, REQUEST)


def test_a_crowd_that_says_nothing_keeps_nobody_out(server: MetricsServer) -> None:
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(server.address, LIMIT)) for _ in range(3 * MAX_REQUESTS)]
        assert TEXT.encode() in ask(server, REQUEST)
        assert len(server._requests) <= MAX_REQUESTS
        assert to_end(crowd[0]) == b"", "the oldest are dropped"


def test_clients_that_leave_at_once_leave_nothing(server: MetricsServer) -> None:
    for data in (b"", b"GET /met", REQUEST):
        with socket.create_connection(server.address, LIMIT) as sock:
            sock.sendall(data)
    eventually(lambda: not server._requests)
    assert TEXT.encode() in ask(server, REQUEST)


def test_counts_that_cannot_be_read_are_no_end() -> None:
    def gone() -> list[Count]:
        raise OSError("the maps are closed")

    with MetricsServer(("127.0.0.1", 0), gone) as server:
        assert ask(server, REQUEST).startswith(b"HTTP/1.1 503")
        assert ask(server, REQUEST).startswith(b"HTTP/1.1 503")


def test_it_frees_its_port() -> None:
    server = MetricsServer(("127.0.0.1", 0), lambda: COUNTS)
    server.close()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address, LIMIT)
