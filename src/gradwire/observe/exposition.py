"""Metrics over HTTP, in the text format of Prometheus.

Guarantees: a request takes about `MAX_REQUEST_BYTES` of memory and `REQUEST_SECONDS` of time at most. Of more than
`MAX_REQUESTS` at a time, the oldest are dropped. Requests change nothing. Does not ask who sends them: whoever reaches
the address can read the metrics.

Source: Prometheus, "Exposition formats", version 0.0.4.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType

from gradwire.core import threads
from gradwire.core.counts import Count
from gradwire.net.acceptor import BACKLOG, Acceptor

logger = logging.getLogger("gradwire")
MAX_REQUEST_BYTES = 8192
MAX_REQUESTS = 32
REQUEST_SECONDS = 5.0
PREFIX = "gradwire_"
_TURN_SECONDS = 0.25
_READ_BYTES = 4096
_END = b"\r\n\r\n"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def render(counts: Iterable[Count]) -> str:
    """Return counts in the text format. Those with the same name follow each other."""
    by_name: dict[str, list[Count]] = {}
    for count in counts:
        by_name.setdefault(count.name, []).append(count)
    lines = []
    for name, found in by_name.items():
        meaning = found[0].meaning.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {PREFIX}{name} {meaning}")
        lines.append(f"# TYPE {PREFIX}{name} {'counter' if name.endswith('_total') else 'gauge'}")
        lines += [f"{PREFIX}{name}{_labels(count.labels)} {float(count.value)!r}" for count in found]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return ""
    escaped = ((key, value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")) for key, value in labels)
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped) + "}"


@dataclass
class _Request:
    """A connection, from its request to the end of the answer."""

    socket: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    unsent: bytes | memoryview = b""


class MetricsServer:
    """Answers ``GET /metrics`` until it is closed. A context manager.

    Args:
        address: Host and port; port 0 takes any free one.
        counts: Returns what to show. Called on a thread of this server.

    Attributes:
        address: Host and port that it listens on.

    Raises:
        OSError: The address cannot be used.
    """

    def __init__(self, address: tuple[str, int], counts: Callable[[], Iterable[Count]]) -> None:
        self._counts = counts
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        listener = socket.create_server(address, family=family, backlog=BACKLOG)
        self.address: tuple[str, int] = (address[0], int(listener.getsockname()[1]))
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(listener, self._selector)
        self._requests: dict[int, _Request] = {}  # by descriptor, the oldest first
        self._ending = threading.Event()
        self._thread = threads.start("gradwire-metrics", self._run, on_error=None)

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host, port = self.address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def close(self) -> None:
        """End the thread and close all connections. Idempotent."""
        self._ending.set()
        threads.end(self._thread)

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- on the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                for key, _ in self._selector.select(_TURN_SECONDS):
                    request = self._requests.get(key.fd)
                    if key.fileobj is self._acceptor.listener:
                        self._accept()
                    elif request is not None and request.socket is key.fileobj:  # not dropped in this turn
                        self._advance(request)
                now = time.monotonic()
                self._acceptor.resume(now)
                for late in [each for each in self._requests.values() if now >= each.deadline]:
                    self._drop(late)
        finally:
            for request in list(self._requests.values()):
                self._drop(request)
            self._acceptor.end()
            self._selector.close()

    def _accept(self) -> None:
        accepted = self._acceptor.accept()
        if accepted is None:
            return
        while len(self._requests) >= MAX_REQUESTS:
            self._drop(next(iter(self._requests.values())))
        sock = accepted[0]
        self._requests[sock.fileno()] = _Request(sock, time.monotonic() + REQUEST_SECONDS)
        self._selector.register(sock, selectors.EVENT_READ)

    def _advance(self, request: _Request) -> None:
        try:
            if request.unsent:
                request.unsent = request.unsent[request.socket.send(request.unsent) :]
                if not request.unsent:
                    request.socket.shutdown(socket.SHUT_WR)
                    self._drop(request)
                return
            received = request.socket.recv(_READ_BYTES)
            request.received += received
            is_whole = _END in request.received
            if is_whole or len(request.received) > MAX_REQUEST_BYTES:
                request.unsent = memoryview(self._answer(bytes(request.received), is_whole))
                self._selector.modify(request.socket, selectors.EVENT_WRITE)
            elif not received:
                self._drop(request)
        except BlockingIOError:
            pass
        except OSError:  # the other end has gone
            self._drop(request)

    def _drop(self, request: _Request) -> None:
        del self._requests[request.socket.fileno()]
        self._selector.unregister(request.socket)
        request.socket.close()

    def _answer(self, received: bytes, is_whole: bool) -> bytes:
        if not is_whole:
            return _response("431 Request Header Fields Too Large")
        line = received.split(b"\r\n", 1)[0].split(b" ")
        if len(line) != 3 or not line[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request")
        method, path = line[0], line[1].split(b"?")[0]
        if path != b"/metrics":
            return _response("404 Not Found", "The metrics are at /metrics.\n")
        if method != b"GET":
            return _response("405 Method Not Allowed", headers="Allow: GET\r\n")
        try:
            return _response("200 OK", render(self._counts()))
        except Exception:  # it is about to end
            logger.debug("The metrics could not be read.", exc_info=True)
            return _response("503 Service Unavailable")


def _response(status: str, body: str = "", headers: str = "") -> bytes:
    content = (body or f"{status}\n").encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {_TEXT}\r\nContent-Length: {len(content)}\r\n{headers}"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content
