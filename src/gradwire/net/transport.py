"""What every transport does: carry frames between the ranks of one group, without blocking the caller.

A transport owns its threads. `send` queues and returns. Frames and failures come through the callbacks given to
`start`, on a thread of the transport; callbacks must only hand them on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradwire.core.errors import SyncError
from gradwire.net.conversation import Conversation
from gradwire.wire.frame import DATA_KINDS, HEADER_BYTES, Header, describe


@dataclass(frozen=True)
class Callbacks:
    """What a transport calls, always from its own thread.

    Attributes:
        admit: Called with (peer, header) before a body is allocated. Raises `FrameError` to refuse the frame, which
            fails the connection. The header has passed its own checks (magic, version, known type).
        deliver: Called with (peer, header, body) for a whole frame with a correct checksum. The body is a uint8 array
            that the callee owns.
        fail: Called once, with the error that ended the transport: a peer is lost, silent, failed or malformed.
        destination: Called with (peer, header) after `admit`. Returns the array that receives the body, uint8 of its
            length, or None for a new one. The bytes are there before their checksum is verified.
        needs: Called with (peer, whether it said goodbye) when a peer is gone, after all of its frames have been
            delivered. If it returns true, the transport ends with an error. Default: true without a goodbye.
    """

    admit: Callable[[int, Header], None]
    deliver: Callable[[int, Header, np.ndarray], None]
    fail: Callable[[SyncError], None]
    needs: Callable[[int, bool], bool] = lambda peer, said_goodbye: not said_goodbye
    destination: Callable[[int, Header], np.ndarray | None] = lambda peer, header: None

    def check_end(self, conversation: Conversation) -> None:
        """Raise the error of a conversation that has ended, if its peer is still needed."""
        error = conversation.end
        assert error is not None, "it has ended"
        if self.needs(conversation.ids.peer, conversation.departed):
            raise error


class PeerState(NamedTuple):
    """A peer as this rank sees it, for people to look at.

    Attributes:
        peer: The other rank.
        sent_bytes: Bytes of whole frames handed to `send`.
        received_bytes: Bytes of whole frames delivered.
        busy_seconds: How long there were unacknowledged bytes under way to it; 0.0 if unknown.
        silent_seconds: Time since its last byte; None if unknown.
        gone: Whether nothing more comes from it.
    """

    peer: int
    sent_bytes: int
    received_bytes: int
    busy_seconds: float = 0.0
    silent_seconds: float | None = None
    gone: bool = False


class Transport(ABC):
    """Frames to and from the other ranks of a group.

    Attributes:
        rank: This process in the group.
        world_size: Ranks in the group.
        epoch: 64-bit id of the group's incarnation, which every header carries.
        prefix_bytes: Bytes of a frame before its body.
        sent_bytes: Bytes of whole frames handed to `send`, by peer.
        received_bytes: Bytes of whole frames delivered, by peer.
        control_bytes: Bytes of the transport's own frames (heartbeats, closing messages), both ways, by peer.
    """

    rank: int
    world_size: int
    epoch: int
    prefix_bytes: int = HEADER_BYTES
    sent_bytes: list[int]
    received_bytes: list[int]
    control_bytes: list[int]

    @abstractmethod
    def start(self, callbacks: Callbacks) -> None:
        """Begin to deliver. Call it once, before the first `send`."""

    @abstractmethod
    def send(self, peer: int, header: Header, body: np.ndarray, on_sent: Callable[[], None] | None = None) -> None:
        """Queue one frame for `peer` and return at once. Frames to one peer arrive in order.

        Args:
            peer: The receiving rank.
            header: All fields but payload length and checksum, which the transport fills in.
            body: Contiguous uint8 array. Must not change before `on_sent` is called, or before the step has ended.
            on_sent: Called on any thread when `body` is not needed any more. Must only hand this on.

        On failure: nothing is raised; the `fail` callback gets the error, and `on_sent` is not called.
        """

    @abstractmethod
    def departed(self, peer: int) -> SyncError | None:
        """Return the error for whoever needs `peer`, once it is gone; None while it is there.

        Nothing more comes from a peer that is gone, and sending to it fails.
        """

    def busy_seconds(self) -> float:
        """Return how long connections have had unacknowledged bytes under way, added up over peers.

        0.0 if the operating system does not count it.
        """
        return 0.0

    def peer_states(self) -> list[PeerState]:
        """Return what this rank sees of each peer. Any thread may ask."""
        counts = enumerate(zip(self.sent_bytes, self.received_bytes, strict=True))
        return [
            PeerState(peer, sent, received, gone=self.departed(peer) is not None)
            for peer, (sent, received) in counts
            if peer != self.rank
        ]

    @abstractmethod
    def abort(self, reason: str, blame: int | None = None) -> None:
        """Tell every peer that can be reached that this rank gives up and why, then close.

        Args:
            reason: A sentence.
            blame: The rank at fault, if it is another one.
        """

    @abstractmethod
    def close(self) -> None:
        """Send what is queued (within the deadline), say goodbye, end threads and sockets."""


class PeerTransport(Transport):
    """Base of transports that keep a `Conversation` per peer, in `_conversations`."""

    _conversations: dict[int, Conversation]

    @property
    def received_bytes(self) -> list[int]:  # type: ignore[override]
        """Bytes of whole frames delivered, by peer."""
        return self._by_peer("received_bytes")

    @property
    def control_bytes(self) -> list[int]:  # type: ignore[override]
        """Bytes of control frames, both ways, by peer."""
        return self._by_peer("control_bytes")

    def departed(self, peer: int) -> SyncError | None:
        """See `Transport`."""
        return self._conversations[peer].end

    def _check_outgoing(self, peer: int, header: Header) -> None:
        """Check that a caller's frame may go to `peer`.

        Raises:
            ValueError: No such peer, a control frame, or a header with another rank's or epoch's number.
        """
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise ValueError(f"Rank {self.rank} of {self.world_size} cannot send to rank {peer}. Pass another rank.")
        if header.kind not in DATA_KINDS:
            raise ValueError(f"{describe(header)} is not a data frame. Control frames are the transport's.")
        if header.sender != self.rank or header.epoch != self.epoch:
            raise ValueError(
                f"The header has sender {header.sender} and epoch {header.epoch:#x}, and the transport has "
                f"{self.rank} and {self.epoch:#x}. Fill both in from the transport."
            )

    def _by_peer(self, counter: str) -> list[int]:
        counts = [0] * self.world_size
        for peer, conversation in self._conversations.items():
            counts[peer] = getattr(conversation, counter)
        return counts
