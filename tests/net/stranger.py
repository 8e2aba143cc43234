"""Ends with the job key and without a protocol."""

from __future__ import annotations

import queue
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
