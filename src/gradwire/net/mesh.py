"""From addresses to a full mesh of proven TCP connections: rank i calls every rank below it and is called by
the rest.

Guarantees: ends within the deadline with a connection to every peer or with an error that names the missing
ones; a stranger at the port costs one descriptor for a few seconds and never a place in the mesh; no socket
leaks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import time
from dataclasses import dataclass

from gradwire.core.errors import FrameError, PeerTimeoutError
from gradwire.net.acceptor import Acceptor
from gradwire.net.handshake import Handshake
from gradwire.net.pending_connection import HANDSHAKE_SECONDS, PendingConnection
from gradwire.net.rendezvous import Deadline, Meeting
from gradwire.net.stream import FrameReader

logger = logging.getLogger("gradwire")

SPARE_CANDIDATES = 64
_FIRST_RETRY, _LONGEST_RETRY = 0.02, 1.0


@dataclass(frozen=True)
class EstablishedConnection:
    """A proven connection, and the reader that may hold bytes which came behind the handshake."""

    socket: socket.socket
    reader: FrameReader


class MeshBuilder:
    """Makes the connections of one rank.

    Args:
        listener: listening socket at the address that this rank has published.
        meeting: what the rendezvous gave.
        deadline: by when the mesh must stand.
    """

    def __init__(self, listener: socket.socket, meeting: Meeting, deadline: Deadline) -> None:
        self._listener = listener
        self._meeting = meeting
        self._deadline = deadline
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(listener, self._selector)
        self._candidates: dict[socket.socket, PendingConnection] = {}
        self._ready: dict[int, EstablishedConnection] = {}
        self._retry_at: dict[int, float] = {}
        self._pauses: dict[int, float] = {}
        self._problems: dict[int, str] = {}
        self._strangers = 0

    def build(self) -> dict[int, EstablishedConnection]:
        """Return a connection for every peer.

        Raises:
            PeerTimeoutError: some are missing at the deadline; names them and their last problem.
        """
        member = self._meeting.member
        try:
            self._retry_at = dict.fromkeys(range(member.rank), 0.0)
            while len(self._ready) < member.world_size - 1:
                if self._deadline.left == 0:
                    raise self._timeout()
                self._turn()
            return self._ready
        except BaseException:
            for connection in self._ready.values():
                connection.socket.close()
            raise
        finally:
            for sock in self._candidates:
                sock.close()
            self._selector.close()

    def _turn(self) -> None:
        now = time.monotonic()
        for peer, at in list(self._retry_at.items()):
            if at <= now:
                del self._retry_at[peer]
                self._call(peer)
        times = [*self._retry_at.values(), *(candidate.expires for candidate in self._candidates.values())]
        self._acceptor.resume(now)
        if self._acceptor.rests_until is not None:
            times.append(self._acceptor.rests_until)
        wait = min([self._deadline.left, *(max(0.0, at - now) for at in times)])
        for key, _ in self._selector.select(wait):
            if key.fileobj is self._listener:
                self._answer()
            elif key.fileobj in self._candidates:  # not dropped earlier in this turn
                self._progress(self._candidates[key.fileobj])
        for candidate in list(self._candidates.values()):
            if time.monotonic() >= candidate.expires:
                self._drop(candidate, "it did not finish the handshake in time")

    def _call(self, peer: int) -> None:
        host, port = self._meeting.addresses[peer]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        handshake = Handshake(self._meeting.member, self._meeting.key, frozenset({peer}), connect=True)
        # The acceptor may be busy in its own rendezvous: only the whole deadline bounds a call.
        candidate = PendingConnection(sock, handshake, time.monotonic() + self._deadline.left + 1)
        self._candidates[sock] = candidate
        code = sock.connect_ex((host, port))
        self._selector.register(sock, selectors.EVENT_WRITE)
        if code not in (0, errno.EINPROGRESS):
            self._drop(candidate, errno.errorcode.get(code, str(code)))

    def _answer(self) -> None:
        sock = self._acceptor.accept()
        if sock is None:
            return
        member = self._meeting.member
        waiting = [candidate for candidate in self._candidates.values() if not candidate.handshake.connects]
        if len(waiting) >= member.world_size + SPARE_CANDIDATES:
            self._drop(waiting[0], "too many strangers at the port")
        callers = frozenset(range(member.rank + 1, member.world_size))
        handshake = Handshake(member, self._meeting.key, callers, connect=False)
        self._candidates[sock] = PendingConnection(sock, handshake, time.monotonic() + HANDSHAKE_SECONDS)
        self._selector.register(sock, selectors.EVENT_READ)

    def _progress(self, candidate: PendingConnection) -> None:
        try:
            if self._selector.get_key(candidate.socket).events == selectors.EVENT_WRITE:
                self._connected(candidate)
            else:
                candidate.hear()
        except BlockingIOError:
            return
        except (OSError, FrameError) as error:
            self._drop(candidate, str(error))
            return
        if candidate.handshake.done:
            self._promote(candidate)

    def _connected(self, candidate: PendingConnection) -> None:
        code = candidate.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, str(code)))
        self._selector.modify(candidate.socket, selectors.EVENT_READ)
        candidate.say(candidate.handshake.opening())

    def _promote(self, candidate: PendingConnection) -> None:
        peer = candidate.handshake.peer
        assert peer is not None
        if peer in self._ready:  # one rank, one connection: the first stands
            self._drop(candidate, "it is connected already")
            return
        self._forget(candidate)
        candidate.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ready[peer] = EstablishedConnection(candidate.socket, candidate.reader)

    def _drop(self, candidate: PendingConnection, problem: str) -> None:
        self._forget(candidate)
        candidate.socket.close()
        peer = candidate.handshake.peer
        if peer is not None:
            self._problems[peer] = problem
        if peer is not None and peer < self._meeting.member.rank:
            pause = self._pauses.get(peer, _FIRST_RETRY)
            self._pauses[peer] = min(2 * pause, _LONGEST_RETRY)
            self._retry_at[peer] = time.monotonic() + pause
        else:
            self._strangers += 1
            if self._strangers & (self._strangers - 1) == 0:  # 1, 2, 4, 8...: a flood does not fill the log
                logger.warning("Refused %d connections so far; the last: %s", self._strangers, problem)

    def _forget(self, candidate: PendingConnection) -> None:
        del self._candidates[candidate.socket]
        with contextlib.suppress(KeyError):
            self._selector.unregister(candidate.socket)

    def _timeout(self) -> PeerTimeoutError:
        member = self._meeting.member
        missing = [r for r in range(member.world_size) if r != member.rank and r not in self._ready]
        problems = "".join(f" Rank {r}: {self._problems[r]}." for r in missing if r in self._problems)
        return PeerTimeoutError(
            f"Expected connections with all ranks within {self._deadline.timeout.total_seconds():g} s, got "
            f"none with ranks {missing} (at rank {member.rank}).{problems} Look for a firewall between the "
            "machines, and set GLOO_SOCKET_IFNAME to the interface that they share.",
            rank=missing[0],
            phase="connect",
        )
