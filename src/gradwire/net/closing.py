"""Graceful close: a closing message to every peer, and time for it to arrive.

Closing a socket that has unread bytes, or that gets more of them later, resets the connection. Bytes that the kernel
has not delivered by then are lost. Therefore this end half-closes the connection after its closing message, and drops
what the peer still sends until the peer closes too. It waits at most `LINGER_SECONDS`, or after BYE as long as bytes
are on their way.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from gradwire.core.errors import PeerLostError, SyncError
from gradwire.net.link import Link
from gradwire.wire.frame import FrameKind

LINGER_SECONDS = 1.0


@dataclass(frozen=True)
class ClosingMessage:
    """The last frame to each peer.

    Attributes:
        kind: BYE, sent after everything that is queued, or ABORT or GOAWAY, sent instead.
        reason: Reason of ABORT or GOAWAY.
        blame: Rank at fault, if it is another one.
    """

    kind: FrameKind
    reason: str = ""
    blame: int | None = None


def close_gracefully(links: Iterable[Link], message: ClosingMessage, timeout: timedelta) -> SyncError | None:
    """Send a closing message to every peer and close all links. Ends within the timeouts, whatever peers do.

    Args:
        links: Links that may be open.
        message: The closing message.
        timeout: For BYE, longest time in which a peer takes no bytes of what is queued here or in the kernel. ABORT
            and GOAWAY get `LINGER_SECONDS` altogether.

    Returns:
        The error of the first peer that did not take what was queued for it.
    """
    with selectors.PollSelector() as selector:  # takes no descriptor: the process may have none left
        closings = [_Closing(link, message, timeout, selector) for link in links if link.open]
        while any(closing.link.open for closing in closings):
            now = time.monotonic()
            deadline = min(closing.deadline for closing in closings if closing.link.open)
            for key, events in selector.select(max(0.0, deadline - now)):
                key.data.progress(events, time.monotonic())
            for closing in closings:
                closing.expire(time.monotonic())
    return next((closing.error for closing in closings if closing.error), None)


class _Closing:
    """The graceful close of one link."""

    def __init__(
        self, link: Link, message: ClosingMessage, timeout: timedelta, selector: selectors.BaseSelector
    ) -> None:
        self.link = link
        self.error: SyncError | None = None
        self._says_bye = message.kind is FrameKind.BYE
        self._patience = timeout.total_seconds() if self._says_bye else LINGER_SECONDS
        self._selector = selector
        if not self._says_bye:
            link.drop_unsent()
        frame = link.conversation.control(message.kind, message.reason, message.blame)
        link.enqueue(frame)
        link.wait_for_much(False)
        self.deadline = self._gives_up = time.monotonic() + self._patience
        self._undelivered = 0
        selector.register(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def progress(self, events: int, now: float) -> None:
        unsent = self.link.pending_frames
        if events & selectors.EVENT_WRITE and self.link.writable:
            self._send(now)
        if events & selectors.EVENT_READ and self.link.open and not self.link.discard():
            self._close(unsent)

    def expire(self, now: float) -> None:
        if not self.link.open or now < self.deadline:
            return
        undelivered = self.link.undelivered_bytes() if self._says_bye and not self.link.writable else 0
        if undelivered != self._undelivered:
            self._undelivered, self._gives_up = undelivered, now + self._patience
        if undelivered and now < self._gives_up:
            self.deadline = now + LINGER_SECONDS
        else:
            self._close(self.link.pending_frames)

    def _send(self, now: float) -> None:
        unsent = self.link.pending_frames
        self.link.flush(now)
        if not self.link.writable:
            self._close(unsent)
        elif self.link.pending:
            if self._says_bye:
                self.deadline = now + self._patience
        else:
            self.link.finish_sending()
            self.deadline = now + LINGER_SECONDS
            self._selector.modify(self.link.socket, selectors.EVENT_READ, self)

    def _close(self, unsent: int) -> None:
        self._selector.unregister(self.link.socket)
        self.link.close()
        if self._says_bye and unsent > 1:  # more than the goodbye itself
            peer = self.link.peer
            self.error = PeerLostError(
                f"Rank {peer} did not take the last {unsent - 1} frames queued for it before closing: it took nothing "
                f"for {self._patience:g} s, or closed its connection. Look at the log of rank {peer}.",
                rank=peer,
                phase="close",
            )
