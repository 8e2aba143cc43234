"""Frames over TCP between ends that come and go: a server that listens, or a worker that calls and calls again.

One thread serves all connections. Unlike a group (`gradwire.net.tcp`), which fails as a whole, a hub outlives any
of its peers: what a peer does costs that peer its connection, and the owner is told.

Guarantees: connections are proven with the job key before a frame is looked at; a second proven connection of a peer
takes the place of the first; a peer that is silent for the whole timeout, sends what is refused, or resets is told to
the owner as one typed error; strangers cost a descriptor for a few seconds. Frames for a peer that is not there are
dropped: the owner's protocol sends again what has not been answered.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

from gradwire.core.errors import FrameError, OptionError, SyncError
from gradwire.net.closing import ClosingMessage, close_gracefully
from gradwire.net.conversation import Conversation, PeerIds
from gradwire.net.forks import ProcessBound
from gradwire.net.handshake import GroupMember, JobKey
from gradwire.net.link import Link
from gradwire.net.pending import PendingConnections
from gradwire.net.pending_connection import PendingConnection
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header, seal

logger = logging.getLogger("gradwire")
# The two ends may have different timeouts: neither can be below four of these.
HEARTBEAT = timedelta(seconds=0.25)
_EMPTY = np.empty(0, np.uint8)


class EndpointOwner(Protocol):
    """Who is told; always on the hub's thread."""

    def admit(self, peer: int, header: Header) -> None:
        """Refuse a header with `FrameError` before its body is allocated."""

    def joined(self, peer: int) -> None:
        """A peer is connected; or connected again, in place of its connection before.

        What is sent from here goes first: until this returns, other threads find no connection.
        """

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        """Take a whole frame, or refuse it with `FrameError`, which costs the peer its connection."""

    def left(self, peer: int, error: SyncError | None) -> None:
        """A peer's connection is gone; None where it has said goodbye."""

    def failed(self, error: SyncError) -> None:
        """The hub's thread has ended because of an exception, and all connections with it, for good."""


class ReconnectingEndpoint(ProcessBound):
    """The connections of one end.

    Args:
        member: who this end is.
        key: the job key.
        owner: who is told.
        timeout: how long a peer may be silent.
        listener: listening socket, for an end that is called; the hub closes it.
        callers: the ranks that may call.
        call: rank and address to call, and to call again whenever that connection is lost.
        start_with: the command that starts whoever is called, for the log while nobody answers.

    Raises:
        OptionError: a timeout below a second.

    Attributes:
        sent_bytes: of frames of the owner, headers included.
    """

    def __init__(
        self, member: GroupMember, key: JobKey, owner: EndpointOwner, *,
        timeout: timedelta, listener: socket.socket | None = None,
        callers: frozenset[int] = frozenset(), call: tuple[int, tuple[str, int]] | None = None, start_with: str = "",
    ) -> None:  # fmt: skip
        if timeout < 4 * HEARTBEAT:
            raise OptionError(f"Expected a timeout of at least {4 * HEARTBEAT.total_seconds():g} s, got {timeout}.")
        self._member = member
        self._owner = owner
        self._timeout = timeout
        self.sent_bytes = 0
        self._links: dict[int, Link] = {}
        self._newcomer: Link | None = None
        self._connections: dict[int, int] = {}
        self._dismissed: list[tuple[Link, str]] = []
        self._last_word: ClosingMessage | None = None
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._pending = PendingConnections(
            member, key, self._selector, listener=listener, callers=callers, call=call, start_with=start_with
        )
        self._thread = threading.Thread(target=self._run, name=f"gradwire-hub-{member.group}", daemon=True)
        self._bind()

    @property
    def problem(self) -> str:
        """Why the last call has failed; empty once one has not."""
        return self._pending.problem

    def start(self) -> None:
        """Begin to answer and to call."""
        self._thread.start()

    def connection(self, peer: int) -> int:
        """Number of a peer's latest connection, 0 before there is one.

        Within `EndpointOwner.deliver` it is the number of the connection that brought the frame.
        """
        return self._connections.get(peer, 0)

    def send(self, peer: int, header: Header, body: np.ndarray, connection: int | None = None) -> bool:
        """Queue one frame and return at once; False where the peer is not there and the frame is dropped.

        Args:
            peer: for whom it is.
            header: of the frame.
            body: of the frame.
            connection: the connection that it is for, where a later one is to do without it.

        Raises:
            SyncError: this process is a fork of the one that the hub belongs to.
        """
        self.check_process()
        head = seal(header, body)
        with self._lock:
            link = self._link(peer, connection)
            if link is None or not link.open or self._last_word is not None:
                return False
            link.enqueue(head, body)
            self.sent_bytes += HEADER_BYTES + body.nbytes
            if not link.blocked:
                link.flush(time.monotonic())
            if link.pending:
                self._wake()
        return True

    def pause(self, peer: int, paused: bool) -> None:
        """Read nothing more from a peer for now, while it is taken to be alive; or go on. A new connection is read."""
        with self._lock:
            link = self._link(peer, None)
            if link is not None and link.paused != paused:
                link.paused = paused
                self._wake()

    def dismiss(self, peer: int, reason: str, connection: int | None = None) -> None:
        """Tell a peer why it is not wanted, and close its connection; the owner hears `left` then.

        Args:
            peer: whom.
            reason: what it is told.
            connection: the connection that is not wanted; default the one that there is now. A later one stays.
        """
        with self._lock:
            link = self._link(peer, connection)
            if link is not None:
                self._dismissed.append((link, reason))
                self._wake()

    def close(self, reason: str = "", *, for_good: bool = True) -> None:
        """Say goodbye after all that is queued; or, with a reason, that in its place. Idempotent.

        Args:
            reason: why this ends before its time.
            for_good: whether peers hear that this end has failed, and not that its connections are lost for now.
        """
        if self.forked:
            return  # its descriptors were closed when it began
        with self._lock:
            kind = FrameKind.ABORT if for_good else FrameKind.GOAWAY
            word = ClosingMessage(kind, reason) if reason else ClosingMessage(FrameKind.BYE)
            self._last_word = self._last_word or word
            self._wake()
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._last_word is None:
                self._turn()
            close_gracefully([link for link in self._links.values() if link.open], self._last_word, self._timeout)
        except Exception as cause:
            logger.exception("The thread of a hub failed.")
            error = SyncError(f"The thread that serves the connections failed: {cause!r}. The log says where.")
            error.__cause__ = cause
            with self._lock:
                self._last_word = self._last_word or ClosingMessage(FrameKind.ABORT, str(error))
            self._owner.failed(error)
            close_gracefully(self._links.values(), self._last_word, self._timeout)
        finally:
            with self._lock:
                self._release()

    def _turn(self) -> None:
        looked_at = time.monotonic()
        self._pending.begin_turn(looked_at)
        for key, events in self._selector.select(self._wait(looked_at)):
            self._progress(key.fileobj, key.data, events)
        self._pending.expire()
        with self._lock:
            dismissed, self._dismissed = self._dismissed, []
        for link, reason in dismissed:
            self._lose(link, SyncError(reason, rank=link.peer), reason)
        for link in list(self._links.values()):
            self._serve(link, looked_at)

    def _wait(self, now: float) -> float | None:
        if any(link.pending and not link.blocked for link in self._links.values()):
            return 0.0
        times = [link.conversation.liveness.next_deadline() for link in self._links.values()]
        times += self._pending.deadlines()
        return max(0.0, min(times) - now) if times else None

    def _progress(self, source: Any, data: Any, events: int) -> None:
        if source is self._wake_in:
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(4096)
        elif not isinstance(data, Link):
            proven = self._pending.progress(source)
            if proven is not None:
                self._promote(proven)
        elif data.open:
            if events & selectors.EVENT_WRITE:
                data.blocked = False
            if events & selectors.EVENT_READ:
                self._take(data, data.receive(time.monotonic()))

    # -- links -----------------------------------------------------------------------------------------------

    def _promote(self, candidate: PendingConnection) -> None:
        peer = candidate.handshake.peer
        assert peer is not None
        if peer in self._links:
            self._lose(self._links[peer], SyncError(f"Rank {peer} has connected anew.", rank=peer), None)
        candidate.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        now = time.monotonic()
        ends = PeerIds(self._member.rank, peer, self._member.epoch)
        link = Link(candidate.socket, Conversation(ends, self._timeout, now, candidate.reader, HEARTBEAT))
        link.conversation.begin(self._owner.admit, now)
        with self._lock:
            self._connections[peer] = self.connection(peer) + 1
            self._newcomer = link
        self._owner.joined(peer)
        with self._lock:
            self._newcomer = None
            self._links[peer] = link
        self._take(link, link.leftover(now))

    def _link(self, peer: int, connection: int | None) -> Link | None:
        """A peer's link, if it is that connection: to this thread also the one that is being announced."""
        if connection is not None and connection != self.connection(peer):
            return None
        if self._newcomer is not None and self._newcomer.peer == peer:
            return self._newcomer if threading.current_thread() is self._thread else None
        return self._links.get(peer)

    def _take(self, link: Link, frames: Iterator[tuple[Header, np.ndarray]]) -> None:
        try:
            for header, body in frames:
                self._owner.deliver(link.peer, header, body)
        except (FrameError, SyncError) as found:
            error = found if isinstance(found, SyncError) else link.conversation.refused(found)
            self._lose(link, error, None if link.conversation.departed else str(error))
            return
        if link.conversation.departed or not link.open:
            self._lose(link, None, None)

    def _serve(self, link: Link, looked_at: float) -> None:
        if not link.open:
            self._lose(link, None, None)
            return
        liveness = link.conversation.liveness
        if link.paused:
            liveness.heard(looked_at)
        if liveness.silent(looked_at):
            error = link.conversation.silence()
            self._lose(link, error, str(error))
            return
        now = time.monotonic()
        with self._lock:
            if liveness.heartbeat_due(now):
                liveness.sent(now)
                if link.writable and not link.pending:
                    link.enqueue(link.conversation.control(FrameKind.HEARTBEAT), _EMPTY)
            if link.pending and not link.blocked:
                link.flush(now)
        self._watch(link)

    def _lose(self, link: Link, error: SyncError | None, last_word: str | None) -> None:
        """Forget a link, with a last word to its peer where there is one to say."""
        if self._links.get(link.peer) is not link:
            return
        with self._lock:
            del self._links[link.peer]
        if link.watched:
            self._selector.unregister(link.socket)
            link.watched = 0
        if last_word is not None and link.open:  # which takes up to a second: the others do not wait for it
            word = ClosingMessage(FrameKind.ABORT, last_word)
            threading.Thread(target=close_gracefully, args=([link], word, self._timeout), daemon=True).start()
        else:
            link.shut()
        self._pending.lost(link.peer)
        self._owner.left(link.peer, error)

    def _watch(self, link: Link) -> None:
        wanted = (not link.paused) * selectors.EVENT_READ | link.blocked * selectors.EVENT_WRITE
        if wanted == link.watched:
            return
        if not wanted:
            self._selector.unregister(link.socket)
        elif link.watched:
            self._selector.modify(link.socket, wanted, link)
        else:
            self._selector.register(link.socket, wanted, link)
        link.watched = wanted

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: a wake-up is under way; closed: nothing to wake
            self._wake_out.send(b"\0")

    def _release(self) -> None:
        for link in self._links.values():
            link.shut()
        self._pending.release()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()
