"""Ends with the job key and without a protocol, and servers that always fail."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np

from gradwire.core.errors import SyncError
from gradwire.net.handshake import GroupMember
from gradwire.net.keys import job_epoch, job_key
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.wire.frame import FrameKind, Header


class Mute:
    """Accepts every connection and frame, and says nothing."""

    def admit(self, peer: int, header: Header) -> None:
        """Accept every frame."""

    def joined(self, peer: int) -> None:
        """Send nothing."""

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        """Ignore it."""

    def left(self, peer: int, error: SyncError | None) -> None:
        """Ignore it."""


class Stranger(Mute):
    """A worker that sends these frames when it is connected.

    Attributes:
        told: How its connections have ended.
    """

    def __init__(self, address: tuple[str, int], worker: int, workers: int, *frames: tuple[FrameKind, bytes]) -> None:
        self.told: queue.SimpleQueue[SyncError | None] = queue.SimpleQueue()
        self._frames = frames
        self._member = GroupMember("gradwire", worker, workers + 1, job_epoch("gradwire"))
        self.endpoint = ReconnectingEndpoint(
            self._member, job_key(address[0], "gradwire"), self, timeout=timedelta(seconds=10), call=(workers, address)
        )
        self.endpoint.start()

    def joined(self, peer: int) -> None:
        for kind, words in self._frames:
            header = Header(kind, sender=self._member.rank, epoch=self._member.epoch)
            self.endpoint.send(peer, header, np.frombuffer(words, np.uint8))

    def left(self, peer: int, error: SyncError | None) -> None:
        self.told.put(error)


class HangUp:
    """A listener that says these words to each caller and closes the connection.

    Attributes:
        address: Its address.
        num_calls: Number of calls so far.
    """

    def __init__(self, words: bytes) -> None:
        self.num_calls = 0
        self._words = words
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                caller, _ = self._listener.accept()
                with caller, contextlib.suppress(OSError):
                    self.num_calls += 1
                    caller.sendall(self._words)


class DyingServer(Mute):
    """The server of one worker. It answers the first message of each connection, and loses the connection.

    Attributes:
        address: Its address.
        num_calls: Number of connections so far.
    """

    def __init__(self, *answers: tuple[FrameKind, bytes]) -> None:
        self.num_calls = 0
        self._answers = answers
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        self._member = GroupMember("gradwire", 1, 2, job_epoch("gradwire"))
        self._endpoint = ReconnectingEndpoint(
            self._member, job_key("127.0.0.1", "gradwire"), self, timeout=timedelta(seconds=10), listener=listener,
            callers=frozenset({0}),
        )  # fmt: skip
        self._endpoint.start()

    def close(self) -> None:
        self._endpoint.close()

    def joined(self, peer: int) -> None:
        self.num_calls += 1

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        for kind, words in self._answers:
            answer = Header(kind, sender=self._member.rank, epoch=self._member.epoch)
            self._endpoint.send(peer, answer, np.frombuffer(words, np.uint8))
        with contextlib.suppress(OSError):  # the peer was first
            self._endpoint._links[peer].socket.shutdown(socket.SHUT_RDWR)


GARBAGE = bytes(range(256)) * 4


@contextmanager
def failing_server(how: str, *answers: tuple[FrameKind, bytes]) -> Iterator[HangUp | DyingServer]:
    """A server that always fails.

    Args:
        how: ``"closes"`` each connection at once, answers ``"garbage"``, or ``"dies"`` at each first message.
        answers: What it says before it dies.
    """
    made = DyingServer(*answers) if how == "dies" else HangUp(GARBAGE if how == "garbage" else b"")
    try:
        yield made
    finally:
        made.close()
