"""What every transport does: carry frames between the ranks of one group, without blocking anybody.

A transport owns its threads. `send` queues and returns; arrivals and failures come through the callbacks
given to `start`, on a thread of the transport, which must only hand them on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradwire.core.errors import SyncError
from gradwire.net.conversation import Conversation
from gradwire.wire.frame import Header


@dataclass(frozen=True)
class Callbacks:
    """What a transport calls, always from its own thread.

    Attributes:
        admit: called with (peer, header) before a body is allocated; raises `FrameError` to refuse the frame,
            which fails the connection. The header has passed its own checks (magic, version, known type).
        deliver: called with (peer, header, body) for a whole frame whose checksum is right. The body is a
            uint8 array that the callee owns.
        fail: called once, with the error that ended the transport: a peer lost, silent, failed or malformed.
        needs: called with (peer, whether it said goodbye) when a peer is gone, after all of its frames have been
            delivered. If true, its departure ends the transport. Default: a goodbye does not, a connection that ends
            without one does.
    """

    admit: Callable[[int, Header], None]
    deliver: Callable[[int, Header, np.ndarray], None]
    fail: Callable[[SyncError], None]
    needs: Callable[[int, bool], bool] = lambda peer, said_goodbye: not said_goodbye

    def check_end(self, conversation: Conversation) -> None:
        """Raise the error of a conversation that has ended, if its peer is still needed."""
        error = conversation.end
        assert error is not None, "it has ended"
        if self.needs(conversation.ends.peer, conversation.departed):
            raise error


class Transport(ABC):
    """Frames to and from the other ranks of a group.

    Attributes:
        rank: this process in the group.
        world_size: ranks in the group.
        epoch: 64-bit id of this group's incarnation, which every header carries.
        sent_bytes: bytes of whole frames handed to `send`, by peer.
        received_bytes: bytes of whole frames delivered, by peer.
        control_bytes: bytes of frames of the transport's own (heartbeats, farewells), both ways, by peer.
    """

    rank: int
    world_size: int
    epoch: int
    sent_bytes: list[int]
    received_bytes: list[int]
    control_bytes: list[int]

    @abstractmethod
    def start(self, callbacks: Callbacks) -> None:
        """Begin to deliver. Called once, before the first `send`."""

    @abstractmethod
    def send(self, peer: int, header: Header, body: np.ndarray) -> None:
        """Queue one frame for `peer` and return at once. Frames to one peer arrive in order.

        Args:
            peer: the receiving rank.
            header: all fields but payload length and checksum, which the transport fills in.
            body: contiguous uint8 array; must not change until the step has ended.

        On failure: nothing is raised; the `fail` callback tells.
        """

    @abstractmethod
    def departed(self, peer: int) -> SyncError | None:
        """The error for whoever needs `peer`, once it is gone; None while it is there.

        Nothing more comes from a peer that is gone, and sending to it fails.
        """

    def busy_seconds(self) -> float:
        """How long connections have had bytes under way that the peer had not acknowledged, added up over peers.

        0.0 where the system does not tell.
        """
        return 0.0

    @abstractmethod
    def abort(self, reason: str, blame: int | None = None) -> None:
        """Tell the peers, as far as they can be reached, that this rank gives up and why; then close.

        Args:
            reason: a sentence.
            blame: the rank at fault, if it is another one.
        """

    @abstractmethod
    def close(self) -> None:
        """End in good order: queued frames are sent (within the deadline), threads and sockets end."""
