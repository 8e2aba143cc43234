"""The connection loop: one thread that serves all connections of one end.

The loop opens and accepts connections, reads and writes frames, sends heartbeats, detects silence and closes
gracefully. What a lost peer means is a policy, and each policy is a subclass: in a mesh (`gradwire.net.tcp`) it ends
the group with a typed error; an endpoint (`gradwire.net.reconnecting`) goes on, and the peer may come back.

Guarantees: no frame is looked at before its connection is proven with the job key. Whatever a peer does, the policy
hears of it as one typed error within the timeout. A wait costs a wake-up per heartbeat and nothing else. A thread that
holds Python's lock for long stops the heartbeats too: the timeout must be longer than any C call that does not release
it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta

import numpy as np

from gradwire.core import threads
from gradwire.core.errors import FrameError, SyncError
from gradwire.net.closing import LINGER_SECONDS, ClosingMessage, close_gracefully
from gradwire.net.conversation import Conversation, PeerIds
from gradwire.net.forks import ProcessBound
from gradwire.net.handshake import GroupMember
from gradwire.net.link import Link
from gradwire.net.pending import PendingConnection, PendingConnections
from gradwire.wire.frame import FrameKind, Header, Outgoing

logger = logging.getLogger("gradwire")
LARGE_BYTES = 1 << 18
"""From this size on, the loop's own thread computes a body's checksum and copies it to the kernel."""


class ConnectionLoop(ProcessBound):
    """Serves the connections of one end. A subclass sets `_pending`, calls `_bind` and starts the thread.

    Args:
        member: This end.
        timeout: Longest silence of a peer.
        kind: Word for the thread's name.
        heartbeat: Longest pause between heartbeats; see `Liveness`.
    """

    _pending: PendingConnections

    def __init__(
        self, member: GroupMember, *, timeout: timedelta, kind: str, heartbeat: timedelta | None = None
    ) -> None:
        self._member = member
        self._timeout = timeout
        self._heartbeat = heartbeat
        self._links: dict[int, Link] = {}
        self._closing: ClosingMessage | None = None  # set once, ends the loop
        self._lock = threading.Lock()  # orders sends, wake-ups and the end
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._woken = False
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._thread = threads.make(f"gradwire-{kind}-{member.group}", self._run, self._tell)

    # -- policy ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _promote(self, pending: PendingConnection) -> None:
        """Take or refuse a connection whose peer is proven."""

    @abstractmethod
    def _deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        """Hand on a frame. Raises `FrameError` to refuse it."""

    @abstractmethod
    def _lose(self, link: Link, error: SyncError | None) -> None:
        """A peer's connection is of no more use; `error` is None if the peer said BYE. Raises to end the loop."""

    @abstractmethod
    def _report(self, error: SyncError) -> None:
        """Tell the owner that the loop has ended with an error."""

    def _handle_requests(self) -> None:
        """Do what other threads have asked for; once per turn."""

    def _undelivered(self, error: SyncError) -> None:
        """A peer did not take what was queued for it when this end closed."""

    # -- any thread ------------------------------------------------------------------------------------------

    def _enqueue(self, link: Link, *frames: Outgoing) -> list[Callable[[], None]]:
        """Queue frames, with the lock held. Returns what to call without it, for frames that the kernel has taken."""
        idle, nbytes = not link.pending, sum(frame.body.nbytes for frame in frames)
        for frame in frames:
            link.enqueue(frame)
        # Straight to the kernel if nothing is ahead: waking the other thread takes longer than the frame on busy cores.
        # A large one is not: its checksum and its copy would keep the caller from encoding the next.
        if idle and not link.blocked and nbytes < LARGE_BYTES:
            link.flush(time.monotonic())
        if link.pending or link.blocked:
            self._wake()
        return link.take_sent()

    @property
    def end_seconds(self) -> float:
        """Longest time that closing takes while no peer takes a byte."""
        return self._timeout.total_seconds() + 2 * LINGER_SECONDS + threads.END_SECONDS

    def _end(self, message: ClosingMessage, seconds: float | None = None) -> None:
        """Close with this message, unless the loop is closing already, and wait for the thread.

        Args:
            message: The closing message.
            seconds: Limit of the wait. None means `end_seconds` from the last byte that a peer took.
        """
        if self.forked:
            return  # its descriptors were closed when it began
        with self._lock:
            self._closing = self._closing or message
            self._wake()
        if seconds is None:
            threads.end(self._thread, self.end_seconds, self._taken_bytes)
        else:
            threads.end(self._thread, seconds)

    def _taken_bytes(self) -> list[tuple[int, int]]:
        """Bytes that this machine's kernel has taken, and those of them on their way, by link."""
        return [(link.taken_bytes, link.undelivered_bytes()) for link in list(self._links.values())]

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with contextlib.suppress(OSError):  # closed: there is nothing to wake
                self._wake_out.send(b"\0")

    # -- the loop's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._closing is None:
                self._turn()
            error = close_gracefully(self._links.values(), self._closing, self._timeout)
            if error is not None:
                self._undelivered(error)
        except BaseException as cause:
            self._fail(cause)
        finally:
            with self._lock:
                self._release()

    def _fail(self, cause: BaseException) -> None:
        error = threads.failure(self._thread.name, cause)
        self._tell(error)
        with self._lock:
            self._closing = self._closing or ClosingMessage(FrameKind.ABORT, str(error), error.rank)
        close_gracefully(self._links.values(), self._closing, self._timeout)

    def _tell(self, error: SyncError) -> None:
        try:
            self._report(error)
        except BaseException:  # the peers must still be told
            logger.exception("The owner of the connections raised on %s", error)

    def _turn(self, until: float = math.inf) -> None:
        """Wait until something happens, or `until` on the monotonic clock, and handle it."""
        # Silence is judged by the time before the sockets were looked at: see `Liveness.silent`.
        looked_at = time.monotonic()
        self._pending.begin_turn(looked_at)
        wait = self._wait(looked_at, until)
        ready = self._selector.select(wait)
        late = time.monotonic() - looked_at - wait
        for link in list(self._links.values()):
            link.conversation.liveness.held_up(late)
        for key, events in ready:
            if key.fileobj is self._wake_in:
                self._clear_wake_up()
            elif isinstance(key.data, Link):
                self._progress(key.data, events)
            else:
                proven = self._pending.progress(key.fileobj)
                if proven is not None:
                    self._promote(proven)
        self._pending.expire()
        self._handle_requests()
        for link in list(self._links.values()):
            if link.open:
                self._serve(link, looked_at)

    def _wait(self, now: float, until: float) -> float:
        links = [link for link in self._links.values() if link.open]
        if any((link.pending and not link.blocked) or link.buffered for link in links):
            return 0.0
        at = min([until, *(link.conversation.liveness.next_deadline() for link in links), *self._pending.deadlines()])
        return min(max(0.0, at - now), threads.WAKE_SECONDS)

    def _clear_wake_up(self) -> None:
        # Before the queues are looked at: whoever queues later sends another byte. Under the lock: a byte sent between
        # the two lines would be taken away with its flag left set, and nobody would ever be woken again.
        with self._lock, contextlib.suppress(BlockingIOError):
            self._woken = False
            self._wake_in.recv(4096)

    def _progress(self, link: Link, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            link.blocked = False
        if events & selectors.EVENT_READ and link.open:
            self._read(link, link.receive(time.monotonic()))

    def _establish(self, pending: PendingConnection) -> Link:
        """Make a link of a proven connection. It takes no data frames before `Conversation.begin`."""
        pending.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert pending.handshake.peer is not None, "it is proven"
        ids = PeerIds(self._member.rank, pending.handshake.peer, self._member.epoch)
        mine, theirs = pending.handshake.frame_macs()
        now = time.monotonic()
        conversation = Conversation(ids, self._timeout, now, pending.reader, self._heartbeat, theirs)
        return Link(pending.socket, conversation, mine)

    def _read(self, link: Link, frames: Iterator[tuple[Header, np.ndarray]]) -> None:
        error = None
        try:
            for header, body in frames:
                self._deliver(link.peer, header, body)
                if self._closing is not None:  # a callback has closed this end
                    return
        except FrameError as refusal:
            error = link.conversation.refused(refusal)
        except SyncError as found:
            error = found
        if error is not None or link.conversation.departed or not link.open:
            self._lose(link, error)

    def _serve(self, link: Link, looked_at: float) -> None:
        """Run the timers of one peer and send what is queued for it."""
        liveness = link.conversation.liveness
        if link.paused:
            liveness.heard(looked_at)
        elif link.buffered or liveness.silent(looked_at):
            self._read(link, link.receive(time.monotonic()))  # less than the selector waits for may be there
        if not link.open or self._links.get(link.peer) is not link:
            return
        if liveness.silent(looked_at):
            self._lose(link, link.conversation.silence())
            return
        now = time.monotonic()
        if liveness.heartbeat_due(now):
            liveness.sent(now)  # also if the queue is stuck: its bytes say the same
            with self._lock:
                if link.writable and not link.pending:
                    link.enqueue(link.conversation.control(FrameKind.HEARTBEAT))
        if link.pending and not link.blocked:
            link.seal()
            with self._lock:
                link.flush(now)
                sent = link.take_sent()
            for call in sent:
                call()
        link.wait_for_much()
        self._watch(link, (not link.paused) * selectors.EVENT_READ | link.blocked * selectors.EVENT_WRITE)

    def _watch(self, link: Link, events: int) -> None:
        """Have the selector look for these events on a link. A link that is to be closed is watched for none first."""
        if events == link.watched:
            return
        if not events:
            self._selector.unregister(link.socket)
        elif link.watched:
            self._selector.modify(link.socket, events, link)
        else:
            self._selector.register(link.socket, events, link)
        link.watched = events

    def _release(self) -> None:
        for link in self._links.values():
            link.close()
        self._pending.release()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()
