"""A rank that holds the job key but speaks with a bare socket, so that tests can misbehave in its name."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import numpy as np
import torch.distributed as dist

from gradwire.net.address import LOOPBACK
from gradwire.net.handshake import Handshake
from gradwire.net.rendezvous import Deadline, Meeting, meet
from gradwire.net.stream import FrameReader
from gradwire.wire.frame import FrameKind, Header, pack

from .recorder import PATIENCE


class BareRank:
    """Rank 1 of 2, over a blocking socket."""

    def __init__(self, store: dist.Store, name: str = "test") -> None:
        self.meeting: Meeting = meet(store, name, 1, 2, (LOOPBACK, 9), Deadline(PATIENCE))
        self.socket = socket.create_connection(self.meeting.addresses[0], PATIENCE.total_seconds())

    def shake_hands(self, then: Callable[[], bytes] = bytes) -> None:
        """Prove that this is rank 1, and send what `then` gives in one piece with the proof."""
        handshake = Handshake(self.meeting.member, self.meeting.key, frozenset({0}), connect=True)
        reader = FrameReader(handshake.admit)
        self.socket.sendall(handshake.opening())
        while not handshake.done:
            count = self.socket.recv_into(reader.wanted())
            assert count, "refused"
            for header, body in reader.advance(count):
                answer = handshake.receive(header, body)
                self.socket.sendall(answer + then() if header.kind is FrameKind.CHALLENGE else answer)

    def frame(self, body: bytes = b"", kind: FrameKind = FrameKind.PAYLOAD, **fields: int) -> bytes:
        return pack(Header(kind, **{"sender": 1, "epoch": self.meeting.member.epoch, **fields}), body)

    def reset(self) -> None:
        """Close the connection with a RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def listen(self) -> list[tuple[Header, np.ndarray]]:
        """All frames up to the end of the connection."""
        reader = FrameReader(lambda header: None)
        found: list[tuple[Header, np.ndarray]] = []
        while count := self.socket.recv_into(reader.wanted()):
            found.extend(reader.advance(count))
        return found
