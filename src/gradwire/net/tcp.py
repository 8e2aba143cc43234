"""A full mesh of TCP connections between the ranks of a group. A peer that is lost ends the group.

Rank i calls every rank below it and is called by the others. After that nobody is called or accepted any more.

Guarantees: whatever happens to a peer (killed, stopped, cut off, closing, sending garbage), this rank learns it within
the timeout as one typed error that names the rank, and tells the others. Connections are proven with a job key: the
one that the user has given (`gradwire.net.keys`), or a random one from the store (`gradwire.net.rendezvous`). A rank
listens at one address, never at all of them. Does not encrypt. Does not reconnect: a group that has failed is set up
again.

Differences from Gloo's pairs: one thread for all peers, typed errors with the rank in them, heartbeats, and a body is
admitted before it is allocated.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

from gradwire.core.errors import OptionError, PeerTimeoutError, SyncError
from gradwire.net.acceptor import BACKLOG
from gradwire.net.address import local_address
from gradwire.net.closing import ClosingMessage
from gradwire.net.handshake import GroupMember, JobKey
from gradwire.net.keys import given_key
from gradwire.net.link import Link
from gradwire.net.loop import ConnectionLoop
from gradwire.net.pending import PendingConnection, PendingConnections
from gradwire.net.rendezvous import Deadline, Meeting, meet
from gradwire.net.transport import Callbacks, PeerState, PeerTransport
from gradwire.wire.frame import FrameKind, Header, Outgoing

ABORT_SECONDS = 5.0


class TcpTransport(PeerTransport, ConnectionLoop):
    """One rank of a group over TCP. `connect` makes it.

    Args:
        meeting: What the rendezvous gave.
        listener: Listening socket at the address that this rank has published; None in a group of one.
        deadline: Deadline of the mesh.
        timeout: Longest silence of a peer, and longest time in which it may take no bytes while this rank closes.

    Raises:
        PeerTimeoutError: Ranks are missing at the deadline. The message names them and their last problem.
    """

    def __init__(
        self, meeting: Meeting, listener: socket.socket | None, deadline: Deadline, *, timeout: timedelta
    ) -> None:
        member = meeting.member
        ConnectionLoop.__init__(self, member, timeout=timeout, kind="tcp")
        self.rank, self.world_size, self.epoch = member.rank, member.world_size, member.epoch
        self.prefix_bytes = meeting.key.prefix_bytes
        self.sent_bytes = [0] * self.world_size
        self._conversations = {}
        self._callbacks: Callbacks | None = None
        self._undeliverable: SyncError | None = None
        self._pending = PendingConnections(
            member, meeting.key, self._selector, listener=listener,
            callers=frozenset(range(member.rank + 1, member.world_size)),
            addresses=dict(enumerate(meeting.addresses[: member.rank])),
            # The acceptor may still be in its own rendezvous: only the whole deadline bounds a call.
            call_seconds=deadline.timeout.total_seconds() + 1,
        )  # fmt: skip
        self._bind()
        try:
            self._connect_all(deadline)
        except BaseException:
            self._release()
            raise
        self._thread.start()

    @classmethod
    def connect(
        cls, store: Any, rank: int, world_size: int, *, timeout: timedelta, name: str,
        connect_timeout: timedelta | None = None, integrity: str | None = None,
    ) -> TcpTransport:  # fmt: skip
        """Meet the other ranks and connect with each.

        Args:
            store: The job's `torch.distributed.Store`.
            rank: This rank.
            world_size: Ranks in the group.
            timeout: Longest silence of a peer.
            name: Prefix in the store. A group may be set up again under its name.
            connect_timeout: Limit of this call, for ranks that start at different times; default `timeout`.
            integrity: See `gradwire.net.handshake.INTEGRITIES`.

        Raises:
            PeerTimeoutError: Ranks are missing at the deadline. The message names them.
            SyncError: The store failed, or the ranks were given different job keys or values of `integrity`.
            OptionError: Rank and world size do not fit, the job key is malformed, or there is no address to listen at.
        """
        if not 0 <= rank < world_size <= 1 << 16:
            raise OptionError(f"Expected rank below world size, at most 65536, got {rank} and {world_size}.")
        deadline = Deadline(connect_timeout or timeout)
        if world_size == 1:
            alone = Meeting(GroupMember(name, 0, 1, secrets.randbits(64)), JobKey.draw(), [])
            return cls(alone, None, deadline, timeout=timeout)
        key = given_key(integrity=integrity)
        host = local_address(store)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=max(BACKLOG, world_size)) as listener:
            address = (host, int(listener.getsockname()[1]))
            meeting = meet(store, name, rank, world_size, address, deadline, key, integrity)
            return cls(meeting, listener, deadline, timeout=timeout)

    def start(self, callbacks: Callbacks) -> None:
        """Begin to deliver. Until then peers may send, and the kernel holds what they do."""
        self.check_process()
        assert self._callbacks is None, "start is called once"
        self._callbacks = callbacks
        with self._lock:
            self._wake()

    def send(self, peer: int, header: Header, body: np.ndarray, on_sent: Callable[[], None] | None = None) -> None:
        """Queue one frame for `peer` and return at once."""
        self.check_process()
        self._check_outgoing(peer, header)
        link = self._links[peer]
        frame = Outgoing(header, body, on_sent)
        with self._lock:
            if self._closing is not None:
                return  # the closing message is the last, and only the loop's thread sends it
            gone = link.conversation.end
            if gone is None:
                self.sent_bytes[peer] += link.frame_bytes(body.nbytes)
                sent = self._enqueue(link, frame)
            else:
                sent, self._undeliverable = [], gone
                self._wake()
        for call in sent:
            call()

    def busy_seconds(self) -> float:
        """See `Transport`. Linux counts it for every TCP connection."""
        return sum(link.busy_seconds() for link in self._links.values())

    def peer_states(self) -> list[PeerState]:
        """See `Transport`."""
        now, links = time.monotonic(), self._links
        return [
            each._replace(
                busy_seconds=links[each.peer].busy_seconds(),
                silent_seconds=links[each.peer].conversation.liveness.silent_seconds(now),
            )
            for each in super().peer_states()
        ]

    def abort(self, reason: str, blame: int | None = None) -> None:
        """Tell every peer why this rank gives up, then close. Returns within `ABORT_SECONDS`, whatever callbacks do."""
        # A callback that blocks must not keep an aborting process from its end.
        self._end(ClosingMessage(FrameKind.ABORT, reason, blame), ABORT_SECONDS)

    def close(self) -> None:
        """Send what is queued, say goodbye, end thread and sockets. Idempotent.

        On failure: if a peer does not take what is queued for it, `fail` is called before this returns.
        """
        self._end(ClosingMessage(FrameKind.BYE))

    def _connect_all(self, deadline: Deadline) -> None:
        """Run the loop in the calling thread until there is a connection with every rank."""
        while len(self._links) < self.world_size - 1:
            if deadline.left == 0:
                raise self._connect_timeout(deadline)
            self._turn(deadline.at)
        self._pending.end()

    def _connect_timeout(self, deadline: Deadline) -> PeerTimeoutError:
        missing = [rank for rank in range(self.world_size) if rank != self.rank and rank not in self._links]
        known = self._pending.problems
        problems = "".join(f" Rank {rank}: {known[rank]}." for rank in missing if rank in known)
        return PeerTimeoutError(
            f"Rank {self.rank} has no connection with ranks {missing} after {deadline.timeout.total_seconds():g} s."
            f"{problems} Look for a firewall between the machines, and set GLOO_SOCKET_IFNAME to the interface that "
            "they share.",
            rank=missing[0],
            phase="connect",
        )

    def _promote(self, pending: PendingConnection) -> None:
        peer = pending.handshake.peer
        assert peer is not None, "it is proven"
        if peer in self._links:  # one rank, one connection: the first stands
            self._pending.refuse(pending.socket, "it is connected already")
            return
        link = self._links[peer] = self._establish(pending)
        link.paused = True  # until `start`
        self._conversations[peer] = link.conversation

    def _handle_requests(self) -> None:
        if self._callbacks is not None:
            for link in self._links.values():
                if link.paused:
                    link.paused = False
                    now = time.monotonic()
                    link.conversation.begin(self._callbacks.admit, now, self._callbacks.destination)
                    self._read(link, link.leftover(now))
        if self._undeliverable is not None:
            raise self._undeliverable

    def _deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        assert self._callbacks is not None, "nothing is read before"
        self._callbacks.deliver(peer, header, body)

    def _lose(self, link: Link, error: SyncError | None) -> None:
        if error is not None and error is not link.conversation.end:
            raise error
        assert self._callbacks is not None, "nothing is read before"
        self._callbacks.check_end(link.conversation)
        self._watch(link, 0)
        # Under the lock: `send` may be between the kernel's taking a frame and its own note that it is sent.
        with self._lock:
            link.depart()

    def _undelivered(self, error: SyncError) -> None:
        self._tell(error)

    def _report(self, error: SyncError) -> None:
        if self._callbacks is not None:
            self._callbacks.fail(error)
