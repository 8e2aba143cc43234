"""Time slots: a mesh in which each rank sends to one peer at a time.

1. In slot s = 1 … W − 1, rank i sends to rank (i + s) mod W. Ranks in the same slot never share a receiver, so each
   link, in both directions, carries one transfer.
2. A transfer is what waits for the peer, up to `SLOT_BYTES`, but at least one frame.
3. The slot ends when the transfer has left: TCP has sent all but `LEFT_BYTES` of it. After slot W − 1 comes slot 1.
4. A slot whose peer has nothing to get takes no time. A rank with nothing to send at all begins with slot 1 next time.
5. A slot in which the kernel takes nothing for `GIVE_UP_SECONDS` ends. Its transfer goes on along with the next ones,
   and its peer gets no other slot before it has left.

Guarantees: frames to one peer stay in order. No peer can hold back the frames of another for longer than (5). Control
frames and the closing message wait for no slot, so that failures are found and told as in every mesh. Ranks may drift
apart: a rank with more to send is in another slot, and two transfers may then meet at a receiver.

Source: HiPress (SOSP 2021), section 3.2. Differences: its coordinator on one node hears of all that waits, and grants
each rank a link and a batch of balanced size for the next slot. Here the order is fixed, so that nothing is asked or
granted, and slots begin on each rank by themselves.
"""

# Shapes: W = ranks.

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from gradwire.core.errors import SyncError
from gradwire.net.closing import ClosingMessage
from gradwire.net.link import Link
from gradwire.net.pending import PendingConnection
from gradwire.net.rendezvous import Deadline, Meeting
from gradwire.net.tcp import TcpTransport
from gradwire.wire.frame import HEADER_BYTES, Outgoing

SLOT_BYTES = 1 << 18
"""Most bytes of a transfer of several frames. A larger frame is a transfer of its own."""
LEFT_BYTES = 1 << 14
"""Less than these of a transfer may still be unsent when it counts as gone, so that the link is never idle."""
GIVE_UP_SECONDS = 0.1


class SlottedTransport(TcpTransport):
    """One rank of a group over TCP that sends in time slots. See `TcpTransport`."""

    def __init__(
        self, meeting: Meeting, listener: socket.socket | None, deadline: Deadline, *, timeout: timedelta
    ) -> None:
        self._waiting: dict[int, deque[Outgoing]] = {peer: deque() for peer in range(meeting.member.world_size)}
        self._slot = 0  # the latest; 0 before slot 1
        self._transfer: Link | None = None  # of this slot
        self._seen_bytes = 0
        self._gives_up_at = math.inf
        super().__init__(meeting, listener, deadline, timeout=timeout)

    def _establish(self, pending: PendingConnection) -> Link:
        link = super()._establish(pending)
        link.limit_unsent(LEFT_BYTES)
        return link

    def _enqueue(self, link: Link, *frames: Outgoing) -> list[Callable[[], None]]:
        self._waiting[link.peer].extend(frames)
        return self._advance()

    def _turn(self, until: float = math.inf) -> None:
        super()._turn(min(until, self._gives_up_at))
        with self._lock:
            sent = self._advance()
        for call in sent:
            call()

    def _advance(self) -> list[Callable[[], None]]:
        """Begin slots until a transfer takes time. Holds the lock; returns what to call without it."""
        sent: list[Callable[[], None]] = []
        while not self._in_transfer(time.monotonic()):
            link = self._next()
            if link is None:
                break
            self._transfer, self._seen_bytes = link, -1
            sent += super()._enqueue(link, *self._take(self._waiting[link.peer]))
        return sent

    def _in_transfer(self, now: float) -> bool:
        """Whether the slot goes on (3, 5). Holds the lock."""
        link = self._transfer
        if link is not None and _is_busy(link):
            if link.taken_bytes != self._seen_bytes:
                self._seen_bytes, self._gives_up_at = link.taken_bytes, now + GIVE_UP_SECONDS
            if now < self._gives_up_at:
                return True
        self._transfer, self._gives_up_at = None, math.inf
        return False

    def _next(self) -> Link | None:
        """Begin the next slot in which there is something to send, if there is one (1, 4). Holds the lock."""
        others = self.world_size - 1
        for step in range(others):
            slot = (self._slot + step) % others + 1
            peer = (self.rank + slot) % self.world_size
            if self._waiting[peer] and not _is_busy(self._links[peer]):
                self._slot = slot
                return self._links[peer]
        if not any(self._waiting.values()):
            self._slot = 0
        return None

    def _take(self, waiting: deque[Outgoing]) -> list[Outgoing]:
        """Take the next transfer to a peer (2)."""
        taken, nbytes = [waiting.popleft()], 0
        while waiting:
            nbytes += HEADER_BYTES + taken[-1].body.nbytes
            if nbytes + HEADER_BYTES + waiting[0].body.nbytes > SLOT_BYTES:
                break
            taken.append(waiting.popleft())
        return taken

    def _lose(self, link: Link, error: SyncError | None) -> None:
        with self._lock:
            self._hand_over(link)  # what has waited is lost with the peer
        super()._lose(link, error)

    def _end(self, message: ClosingMessage, join_seconds: float | None = None) -> None:
        if not self.forked:
            with self._lock:
                if self._closing is None:
                    for link in self._links.values():
                        self._hand_over(link)
        super()._end(message, join_seconds)

    def _hand_over(self, link: Link) -> None:
        waiting = self._waiting[link.peer]
        while waiting:
            link.enqueue(waiting.popleft())


def _is_busy(link: Link) -> bool:
    """Whether a transfer on this link has not left."""
    return link.pending or link.blocked
