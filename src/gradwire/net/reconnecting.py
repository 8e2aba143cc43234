"""TCP connections between ends that come and go: a server that listens, or a worker that calls and calls again.

A lost peer costs its connection and nothing else: the owner is told, and the peer may come back. In a mesh
(`gradwire.net.tcp`), by contrast, a lost peer ends the group.

Guarantees: a second proven connection of a peer replaces the first. A peer that is silent for the whole timeout, sends
what is refused, or resets is reported to the owner as one typed error. Frames for a peer that is not connected are
dropped: the owner's protocol sends again what has not been answered.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Protocol

import numpy as np

from gradwire.core import threads
from gradwire.core.errors import OptionError, SyncError
from gradwire.net.closing import ClosingMessage, close_gracefully
from gradwire.net.handshake import GroupMember, Handshake, JobKey
from gradwire.net.link import Link
from gradwire.net.loop import ConnectionLoop
from gradwire.net.pending import PendingConnection, PendingConnections
from gradwire.wire.frame import FrameKind, Header, Outgoing

# The two ends may have different timeouts: neither can be below four of these.
HEARTBEAT = timedelta(seconds=0.25)


class EndpointOwner(Protocol):
    """Callbacks of an endpoint, always on its thread."""

    def admit(self, peer: int, header: Header) -> None:
        """Raise `FrameError` to refuse a header before its body is allocated."""

    def joined(self, peer: int) -> None:
        """A peer is connected, or connected again in place of its previous connection.

        Frames sent from here go first: until this returns, other threads find no connection.
        """

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        """Take a whole frame, or refuse it with `FrameError`, which costs the peer its connection."""

    def left(self, peer: int, error: SyncError | None) -> None:
        """A peer's connection is gone; `error` is None if it said goodbye."""

    def failed(self, error: SyncError) -> None:
        """The endpoint's thread has ended because of an exception, and all connections with it, for good."""


class ReconnectingEndpoint(ConnectionLoop):
    """All connections of one end.

    Args:
        member: This end.
        key: The job key.
        owner: Receiver of frames and events.
        timeout: Longest silence of a peer; at least a second.
        listener: Listening socket, for an end that is called. The endpoint closes it.
        callers: Ranks that may call.
        call: Rank and address to call, and to call again whenever that connection is lost.
        start_with: Command that starts the called server, for the log while nobody answers.
        tls: TLS settings of this end; None for connections without TLS.

    Raises:
        OptionError: `timeout` is too short.

    Attributes:
        sent_bytes: Bytes of the owner's frames, headers included.
        received_bytes: The same, of frames that were delivered.
    """

    def __init__(
        self, member: GroupMember, key: JobKey, owner: EndpointOwner, *,
        timeout: timedelta, listener: socket.socket | None = None,
        callers: frozenset[int] = frozenset(), call: tuple[int, tuple[str, int]] | None = None, start_with: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        if timeout < 4 * HEARTBEAT:
            least = 4 * HEARTBEAT.total_seconds()
            raise OptionError(f"A timeout of {timeout.total_seconds():g} s is too short. Pass at least {least:g} s.")
        super().__init__(member, timeout=timeout, kind="endpoint", heartbeat=HEARTBEAT)
        self.sent_bytes = self.received_bytes = 0
        self._owner = owner
        self._server = None if call is None else call[0]
        self._joining: Link | None = None
        self._connections: dict[int, int] = {}
        self._handshakes: dict[int, Handshake] = {}
        self._dismissed: list[tuple[Link, str]] = []
        self._dismissals: list[threading.Thread] = []
        self._pending = PendingConnections(
            member, key, self._selector, listener=listener, callers=callers,
            addresses={} if call is None else dict([call]), start_with=start_with, tls=tls,
        )  # fmt: skip
        self._bind()

    @property
    def problem(self) -> str:
        """Why the last call has failed; empty if it has not."""
        return "" if self._server is None else self._pending.problems.get(self._server, "")

    def start(self) -> None:
        """Begin to accept and to call."""
        self._thread.start()

    def connection(self, peer: int) -> int:
        """Return the number of a peer's latest connection, 0 before its first.

        Within `EndpointOwner.deliver` it is the number of the connection that brought the frame.
        """
        return self._connections.get(peer, 0)

    def derive(self, peer: int, use: str) -> bytes:
        """Return 32 bytes that only this end and the peer know, for one use in the peer's latest connection.

        Call it on the endpoint's thread, where the latest connection is the one that brings the frame.
        """
        return self._handshakes[peer].derive(use)

    def host(self, peer: int) -> str:
        """Return the address from which a peer is connected. Call it on the endpoint's thread."""
        return self._handshakes[peer].host.partition("%")[0]  # the socket may have been reset since

    def round_trip_seconds(self, peer: int) -> float:
        """Return the shortest round trip to a peer so far; 0 if unknown. Call it on the endpoint's thread."""
        return self._speaker(peer).round_trip_seconds()

    def _speaker(self, peer: int) -> Link:
        link = self._link(peer, None)
        assert link is not None, "it has just sent a frame"
        return link

    def send(self, peer: int, header: Header, body: np.ndarray, connection: int | None = None) -> bool:
        """Queue one frame and return at once. See `send_all`."""
        return self.send_all(peer, (header, body), connection=connection)

    def send_all(self, peer: int, *frames: tuple[Header, np.ndarray], connection: int | None = None) -> bool:
        """Queue frames, and return at once.

        Args:
            peer: Receiver.
            *frames: Header and body of each frame. Bodies are contiguous uint8 arrays.
            connection: Number of the only connection that the frames are for; default: whichever there is.

        Returns:
            False if the peer is not connected and the frames are dropped.

        Raises:
            SyncError: This process is a fork of the one that the endpoint belongs to.
        """
        self.check_process()
        with self._lock:
            link = self._link(peer, connection)
            if link is None or not link.open or self._closing is not None:
                return False
            self.sent_bytes += sum(link.frame_bytes(body.nbytes) for _, body in frames)
            self._enqueue(link, *(Outgoing(header, body) for header, body in frames))
        return True

    def pause(self, peer: int, paused: bool) -> None:
        """Stop reading from a peer, which then counts as alive, or go on. A new connection starts unpaused."""
        with self._lock:
            link = self._link(peer, None)
            if link is not None and link.paused != paused:
                link.paused = paused
                self._wake()

    def dismiss(self, peer: int, reason: str, connection: int | None = None) -> None:
        """Tell a peer why it is not wanted, and close its connection. The owner's `left` is called then.

        Args:
            peer: The peer.
            reason: A sentence for the peer.
            connection: Number of the unwanted connection; default: the present one. A later one stays.
        """
        with self._lock:
            link = self._link(peer, connection)
            if link is not None:
                self._dismissed.append((link, reason))
                self._wake()

    def close(self, reason: str = "", *, for_good: bool = True) -> None:
        """Send what is queued and say goodbye; with a reason, send only that. Idempotent.

        Args:
            reason: Why this end closes early.
            for_good: With a reason: whether peers hear that this end has failed (ABORT), or only that they lose it for
                now (GOAWAY).
        """
        kind = FrameKind.ABORT if for_good else FrameKind.GOAWAY
        self._end(ClosingMessage(kind, reason) if reason else ClosingMessage(FrameKind.BYE))
        for thread in self._dismissals if threading.current_thread() is not self._thread else ():
            threads.end(thread)

    def _promote(self, pending: PendingConnection) -> None:
        link = self._establish(pending)
        peer = link.peer
        if peer in self._links:
            self._disconnect(self._links[peer], SyncError(f"Rank {peer} has connected again.", rank=peer), tell=False)
        now = time.monotonic()
        link.conversation.begin(self._owner.admit, now)
        self._handshakes[peer] = pending.handshake
        with self._lock:
            self._connections[peer] = self.connection(peer) + 1
            self._joining = link
        self._owner.joined(peer)
        with self._lock:
            self._joining = None
            self._links[peer] = link
        self._read(link, link.leftover(now))

    def _link(self, peer: int, connection: int | None) -> Link | None:
        """Return a peer's link, if it is that connection. This thread also finds the one that is being announced."""
        if connection is not None and connection != self.connection(peer):
            return None
        if self._joining is not None and self._joining.peer == peer:
            return self._joining if threading.current_thread() is self._thread else None
        return self._links.get(peer)

    def _handle_requests(self) -> None:
        with self._lock:
            dismissed, self._dismissed = self._dismissed, []
        for link, reason in dismissed:
            self._lose(link, SyncError(reason, rank=link.peer))

    def _deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        link = self._link(peer, None)
        self.received_bytes += 0 if link is None else link.frame_bytes(body.nbytes)
        self._owner.deliver(peer, header, body)

    def _lose(self, link: Link, error: SyncError | None) -> None:
        self._disconnect(link, error, tell=error is not None and not link.conversation.departed)

    def _disconnect(self, link: Link, error: SyncError | None, *, tell: bool) -> None:
        """Forget a link, and tell its peer the error if it is to know."""
        if self._links.get(link.peer) is not link:
            return
        with self._lock:
            del self._links[link.peer]
        self._watch(link, 0)
        if tell and link.open:  # takes up to a second, for which the other peers do not wait
            # Also to one that was silent: a process that was frozen counts as dead, and ends when it goes on.
            message = ClosingMessage(FrameKind.ABORT, str(error))
            say = partial(close_gracefully, [link], message, self._timeout)
            self._dismissals = [thread for thread in self._dismissals if thread.is_alive()]
            self._dismissals.append(threads.start("gradwire-dismissal", say, lambda error: link.close()))
        else:
            link.close()
        self._pending.call_again(link.peer)
        self._owner.left(link.peer, error)

    def _report(self, error: SyncError) -> None:
        self._owner.failed(error)
