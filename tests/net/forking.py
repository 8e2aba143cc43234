"""A process whose endpoint is connected, and which forks a child that outlives it."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from multiprocessing.connection import Connection

import numpy as np

from gradwire.core.errors import SyncError
from gradwire.net.handshake import GroupMember, JobKey
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.wire.frame import FrameKind, Header


class Owner:
    """Waits for its connection."""

    def __init__(self) -> None:
        self.connected = threading.Event()

    def admit(self, peer: int, header: Header) -> None:
        """Whatever it is."""

    def joined(self, peer: int) -> None:
        self.connected.set()

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        """Nothing to do."""

    def left(self, peer: int, error: SyncError | None) -> None:
        """Nothing to do."""


def main(line: Connection, member: GroupMember, server: int, port: int) -> None:
    """Connect and fork. The child says over `line` how a send ends there, and lives until the line ends."""
    owner = Owner()
    endpoint = ReconnectingEndpoint(
        member, JobKey(bytes(32)), owner, timeout=timedelta(seconds=20), call=(server, ("127.0.0.1", port))
    )
    endpoint.start()
    owner.connected.wait()
    if os.fork():
        signal.pause()
    said = ""
    try:
        endpoint.send(server, Header(FrameKind.PAYLOAD, sender=member.rank, epoch=member.epoch), np.empty(0, np.uint8))
    except SyncError as error:
        said = str(error)
    endpoint.close()
    line.send(said)
    try:
        line.recv()
    finally:
        os._exit(0)
