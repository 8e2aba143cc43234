"""Frames over TCP: a full mesh of connections between the ranks of a group, served by one thread.

Guarantees: whatever happens to a peer (killed, stopped, cut off, closing, sending garbage), this rank learns
it within the timeout as one typed error that names the rank, and tells the others. A wait costs a wake-up a
quarter of the timeout and nothing else. Connections are proven with a job key
(`gradwire.net.handshake`); a rank listens at one address, never at all of them. Does not encrypt; does
not reconnect: a group that has failed is set up again. A thread that holds Python's lock for long stops the
heartbeats too: the timeout must be longer than any C call that does not release it.

Differences from Gloo's pairs: one thread for all peers, typed errors with the rank in them, heartbeats, and
a body is admitted before it is allocated.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np

from gradwire.core.errors import OptionError, PeerLostError, SyncError
from gradwire.net.address import local_address
from gradwire.net.closing import ClosingMessage, close_gracefully
from gradwire.net.conversation import Conversation, PeerIds
from gradwire.net.forks import ProcessBound
from gradwire.net.link import Link
from gradwire.net.mesh import EstablishedConnection, MeshBuilder
from gradwire.net.outgoing import check_outgoing
from gradwire.net.rendezvous import Deadline, meet
from gradwire.net.transport import Callbacks, Transport
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header, seal

logger = logging.getLogger("gradwire")
ABORT_SECONDS = 5.0
_EMPTY = np.empty(0, dtype=np.uint8)


class TcpTransport(Transport, ProcessBound):
    """One rank of a group over TCP. Made by `connect`.

    Args:
        rank: this rank.
        epoch: epoch of the group.
        connections: a proven connection for every peer.
        timeout: how long a peer may be silent, or take no bytes while this rank closes.
        name: name of the group.
    """

    def __init__(
        self, rank: int, epoch: int, connections: dict[int, EstablishedConnection], *, timeout: timedelta, name: str
    ) -> None:
        self.rank = rank
        self.world_size = len(connections) + 1
        self.epoch = epoch
        self.sent_bytes = [0] * self.world_size
        now = time.monotonic()
        self._links = {
            peer: Link(connection.socket, Conversation(PeerIds(rank, peer, epoch), timeout, now, connection.reader))
            for peer, connection in connections.items()
        }
        self._timeout = timeout
        self._callbacks: Callbacks | None = None
        self._reading = False
        self._last_word: ClosingMessage | None = None  # set once, ends the loop
        self._undeliverable: SyncError | None = None
        self._lock = threading.Lock()  # orders sends, wake-ups and the end of the wake-up socket
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._woken = False
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"gradwire-tcp-{name}", daemon=True)
        self._bind()
        self._thread.start()

    @classmethod
    def connect(
        cls,
        store: Any,
        rank: int,
        world_size: int,
        *,
        timeout: timedelta,
        name: str,
        connect_timeout: timedelta | None = None,
    ) -> TcpTransport:
        """Meet the other ranks and connect with each.

        Args:
            store: the job's `torch.distributed.Store`.
            rank: this rank.
            world_size: ranks in the group.
            timeout: how long a peer may be silent.
            name: prefix in the store; a group may be set up again under its name.
            connect_timeout: bound on this call, for ranks that start at different times; default `timeout`.

        Raises:
            PeerTimeoutError: ranks are missing at the deadline; the message names them.
            SyncError: the store failed.
            OptionError: rank and world size do not fit, or there is no address to listen at.
        """
        if not 0 <= rank < world_size <= 1 << 16:
            raise OptionError(f"Expected rank below world size, at most 65536, got {rank} and {world_size}.")
        if world_size == 1:
            return cls(rank, secrets.randbits(64), {}, timeout=timeout, name=name)
        deadline = Deadline(connect_timeout or timeout)
        host = local_address(store)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=max(128, world_size)) as listener:
            address = (host, int(listener.getsockname()[1]))
            meeting = meet(store, name, rank, world_size, address, deadline)
            connections = MeshBuilder(listener, meeting, deadline).build()
        return cls(rank, meeting.member.epoch, connections, timeout=timeout, name=name)

    @property
    def received_bytes(self) -> list[int]:  # type: ignore[override]
        """Bytes of whole frames delivered, by peer."""
        return self._by_peer("received_bytes")

    @property
    def control_bytes(self) -> list[int]:  # type: ignore[override]
        """Bytes of control frames, both ways, by peer."""
        return self._by_peer("control_bytes")

    def start(self, callbacks: Callbacks) -> None:
        """Begin to deliver. Until then peers may send, and the kernel holds what they do."""
        self.check_process()
        assert self._callbacks is None, "start is called once"
        self._callbacks = callbacks
        with self._lock:
            self._wake()

    def send(self, peer: int, header: Header, body: np.ndarray) -> None:
        """Queue one frame for `peer` and return at once."""
        self.check_process()
        check_outgoing(self, peer, header)
        link = self._links[peer]
        head = seal(header, body)
        with self._lock:
            if self._last_word is not None:
                return  # closing: the last word is the last, and only the transport's thread sends it
            gone = link.conversation.end
            if gone is not None:
                self._undeliverable = gone
            else:
                self.sent_bytes[peer] += HEADER_BYTES + body.nbytes
                idle = not link.pending
                link.enqueue(head, body)
                # Straight to the kernel where nothing is ahead: a hand-over to the other thread costs a wake-up, which
                # on busy cores takes longer than the frame.
                if idle and not link.blocked:
                    link.flush(time.monotonic())
                if not link.pending:
                    return
            self._wake()

    def busy_seconds(self) -> float:
        """See `Transport`; Linux counts it for every TCP connection."""
        return sum(link.busy_seconds() for link in self._links.values())

    def departed(self, peer: int) -> SyncError | None:
        """See `Transport`."""
        return self._links[peer].conversation.end

    def abort(self, reason: str, blame: int | None = None) -> None:
        """Tell every peer why this rank gives up, for at most a second, then close."""
        self._end(ClosingMessage(FrameKind.ABORT, reason, blame))

    def close(self) -> None:
        """Send what is queued, say goodbye, end thread and sockets. Idempotent.

        On failure: where a peer does not take what is queued for it, `fail` is called before this returns.
        """
        self._end(ClosingMessage(FrameKind.BYE))

    def _end(self, word: ClosingMessage) -> None:
        if self.forked:
            return  # its descriptors were closed when it began
        with self._lock:
            self._last_word = self._last_word or word
            self._wake()
        if threading.current_thread() is not self._thread:
            # A callback that blocks must not keep an aborting process from its end.
            self._thread.join(ABORT_SECONDS if word.kind is FrameKind.ABORT else None)

    def _wake(self) -> None:
        if self._woken or threading.current_thread() is self._thread:
            return
        self._woken = True
        with contextlib.suppress(OSError):  # closed: there is nothing to wake
            self._wake_out.send(b"\0")

    def _run(self) -> None:
        try:
            while self._last_word is None:
                self._turn()
            self._finish(self._last_word)
        except SyncError as error:
            self._fail(error)
        except Exception as error:  # a callback raised: the step cannot end well any more
            logger.exception("The thread of a transport failed.")
            self._fail(SyncError(f"Expected the transport's callbacks not to raise, got {error!r}."))
        finally:
            with self._lock:
                self._release()

    def _turn(self) -> None:
        # Silence is judged by the time before the sockets were looked at: see `Liveness.silent`.
        looked_at = time.monotonic()
        links = [link for link in self._links.values() if link.open]
        for key, events in self._selector.select(self._wait(links, looked_at)):
            if key.data is None:
                self._take_wake_up()
                continue
            if events & selectors.EVENT_WRITE:
                key.data.blocked = False
            if events & selectors.EVENT_READ:
                self._deliver(key.data, key.data.receive(time.monotonic()))
        if self._callbacks is not None and not self._reading:
            self._begin_reading(links)
        if self._undeliverable is not None:
            raise self._undeliverable
        for link in links:
            if link.open:
                self._serve(link, looked_at)
            self._watch(link)

    def _wait(self, links: list[Link], now: float) -> float | None:
        if any(link.pending and not link.blocked for link in links):
            return 0.0
        deadlines = [link.conversation.liveness.next_deadline(listening=self._reading) for link in links]
        return max(0.0, min(deadlines) - now) if deadlines else None

    def _take_wake_up(self) -> None:
        # Before the queues are looked at: whoever queues later sends another byte. Under the lock: a byte sent between
        # the two lines would be taken away with its flag left set, and nobody would ever be woken again.
        with self._lock, contextlib.suppress(BlockingIOError):
            self._woken = False
            self._wake_in.recv(4096)

    def _begin_reading(self, links: list[Link]) -> None:
        assert self._callbacks is not None
        self._reading = True
        now = time.monotonic()
        for link in links:
            link.conversation.begin(self._callbacks.admit, now)
            self._deliver(link, link.leftover(now))

    def _deliver(self, link: Link, frames: Iterator[tuple[Header, np.ndarray]]) -> None:
        assert self._callbacks is not None
        try:
            for header, body in frames:
                self._callbacks.deliver(link.peer, header, body)
                if self._last_word is not None:  # a callback has closed the transport
                    return
        except PeerLostError:
            if link.conversation.end is None:  # it is a callback's own
                raise
        if link.open and link.conversation.end is not None:
            self._callbacks.check_end(link.conversation)
            # Under the lock: `send` may be between the kernel's taking a frame and its own note that it is sent.
            with self._lock:
                link.depart()

    def _serve(self, link: Link, looked_at: float) -> None:
        """Run the timers of one peer and send what is queued for it."""
        liveness = link.conversation.liveness
        if self._reading and liveness.silent(looked_at):
            raise link.conversation.silence()
        now = time.monotonic()
        if liveness.heartbeat_due(now):
            liveness.sent(now)  # also where the queue is stuck: its bytes say the same
            if link.writable and not link.pending:
                link.enqueue(link.conversation.control(FrameKind.HEARTBEAT), _EMPTY)
        if link.pending and not link.blocked:
            with self._lock:
                link.flush(now)

    def _watch(self, link: Link) -> None:
        """Have the selector look for what this link waits for, and for nothing else."""
        wanted = 0
        if link.open:
            wanted = self._reading * selectors.EVENT_READ | link.blocked * selectors.EVENT_WRITE
        if wanted == link.watched:
            return
        if not wanted:
            self._selector.unregister(link.socket)
        elif link.watched:
            self._selector.modify(link.socket, wanted, link)
        else:
            self._selector.register(link.socket, wanted, link)
        link.watched = wanted

    def _fail(self, error: SyncError) -> None:
        self._report(error)
        with self._lock:
            self._last_word = self._last_word or ClosingMessage(FrameKind.ABORT, str(error), error.rank)
        close_gracefully(self._links.values(), self._last_word, self._timeout)

    def _finish(self, word: ClosingMessage) -> None:
        error = close_gracefully(self._links.values(), word, self._timeout)
        if error is not None:
            self._report(error)

    def _report(self, error: SyncError) -> None:
        if self._callbacks is None:
            return
        try:
            self._callbacks.fail(error)
        except Exception:  # the peers must still be told
            logger.exception("The fail callback of a transport raised on %s", error)

    def _release(self) -> None:
        for link in self._links.values():
            link.shut()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _by_peer(self, counter: str) -> list[int]:
        counts = [0] * self.world_size
        for peer, link in self._links.items():
            counts[peer] = getattr(link.conversation, counter)
        return counts
