"""A connection that has not been proven yet."""

from __future__ import annotations

import socket

from gradwire.core.errors import FrameError
from gradwire.net.handshake import Handshake
from gradwire.net.stream import FrameReader

# Who calls has its frames ready; who takes longer than this is a stranger.
HANDSHAKE_SECONDS = 5.0


class PendingConnection:
    """A socket with a handshake on it.

    Args:
        sock: non-blocking; connected, or about to be.
        handshake: this end of it.
        expires: by when it must be done, on the monotonic clock.
    """

    def __init__(self, sock: socket.socket, handshake: Handshake, expires: float) -> None:
        self.socket = sock
        self.handshake = handshake
        self.expires = expires
        self.reader = FrameReader(handshake.admit)

    def say(self, frame: bytes) -> None:
        if frame and self.socket.send(frame) != len(frame):
            raise FrameError("Expected room for a handshake frame in a fresh connection, got none.")

    def hear(self) -> None:
        """Read what has come; raises `OSError` or `FrameError` where the handshake has failed."""
        count = self.socket.recv_into(self.reader.wanted())
        if count == 0:
            raise ConnectionResetError("it closed the connection in the handshake")
        for header, body in self.reader.advance(count):
            self.say(self.handshake.receive(header, body))
            if self.handshake.done:
                return  # what follows stays in the reader
