"""How connections end: a last word to every peer, and time for it to arrive.

A socket that is closed with unread bytes, or that gets more of them later, resets the connection: what the kernel has
not delivered by then is lost. So the last word is followed by a half close, and what the peer still sends is read and
dropped until it closes too; for at most `LINGER_SECONDS`, and after a goodbye for as long as bytes are on their way.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from gradwire.core.errors import PeerLostError, SyncError
from gradwire.net.link import Link
from gradwire.wire.frame import FrameKind

LINGER_SECONDS = 1.0


@dataclass(frozen=True)
class ClosingMessage:
    """What a rank says when it ends.

    Attributes:
        kind: BYE, after all that is queued, or ABORT or GOAWAY, instead of it.
        reason: why, for ABORT and GOAWAY.
        blame: the rank at fault, if it is another.
    """

    kind: FrameKind
    reason: str = ""
    blame: int | None = None


def close_gracefully(links: Iterable[Link], word: ClosingMessage, timeout: timedelta) -> SyncError | None:
    """Say the last word to every peer and close all links. Ends within the timeouts, whatever peers do.

    Args:
        links: those that may still be open.
        word: what to say.
        timeout: for BYE, how long a peer may take no bytes of what is queued here or in the kernel. ABORT and
            GOAWAY get `LINGER_SECONDS` in all.

    Returns:
        The error of the first peer that did not take what was queued for it.
    """
    with selectors.DefaultSelector() as selector:
        departures = [_Departure(link, word, timeout, selector) for link in links if link.open]
        while any(departure.link.open for departure in departures):
            now = time.monotonic()
            deadline = min(departure.deadline for departure in departures if departure.link.open)
            for key, events in selector.select(max(0.0, deadline - now)):
                key.data.progress(events, time.monotonic())
            for departure in departures:
                departure.expire(time.monotonic())
    return next((departure.error for departure in departures if departure.error), None)


class _Departure:
    """The end of one link."""

    def __init__(self, link: Link, word: ClosingMessage, timeout: timedelta, selector: selectors.BaseSelector) -> None:
        self.link = link
        self.error: SyncError | None = None
        self._says_bye = word.kind is FrameKind.BYE
        self._patience = timeout.total_seconds() if self._says_bye else LINGER_SECONDS
        self._selector = selector
        if not self._says_bye:
            link.drop_unsent()
        frame = link.conversation.control(word.kind, word.reason, word.blame)
        link.enqueue(frame, np.empty(0, dtype=np.uint8))
        self.deadline = self._gives_up = time.monotonic() + self._patience
        self._undelivered = 0
        selector.register(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def progress(self, events: int, now: float) -> None:
        unsaid = self.link.pending_frames
        if events & selectors.EVENT_WRITE and self.link.writable:
            self._send(now)
        if events & selectors.EVENT_READ and self.link.open and not self.link.discard():
            self._close(unsaid)

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
        unsaid = self.link.pending_frames
        self.link.flush(now)
        if not self.link.writable:
            self._close(unsaid)
        elif self.link.pending:
            if self._says_bye:
                self.deadline = now + self._patience
        else:
            self.link.finish_sending()
            self.deadline = now + LINGER_SECONDS
            self._selector.modify(self.link.socket, selectors.EVENT_READ, self)

    def _close(self, unsaid: int) -> None:
        self._selector.unregister(self.link.socket)
        self.link.shut()
        if self._says_bye and unsaid > 1:  # more than the goodbye itself
            peer = self.link.peer
            self.error = PeerLostError(
                f"Expected rank {peer} to take the {unsaid - 1} frames queued for it before closing, got none "
                f"taken within {self._patience:g} s or a closed connection. Look at the log of rank {peer}.",
                rank=peer,
                phase="close",
            )
