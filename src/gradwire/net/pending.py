"""Connections whose handshake has not ended: those that this end opens, and those that others open to it.

Guarantees: an unauthenticated peer costs one descriptor for a few seconds. A rank to call is called again, with growing
pauses, until it has proven itself.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any

from gradwire.core.errors import FrameError
from gradwire.net.acceptor import Acceptor
from gradwire.net.handshake import GroupMember, Handshake, JobKey
from gradwire.net.stream import FrameReader
from gradwire.net.tls import AnySocket, TlsSocket

logger = logging.getLogger("gradwire")
# A real peer has its frames ready.
HANDSHAKE_SECONDS = 5.0
SPARE_CONNECTIONS = 64
"""Unauthenticated connections that are held at once, beyond one per expected caller."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class PendingConnection:
    """A socket and its handshake.

    Args:
        sock: Non-blocking socket, connected or connecting, perhaps under TLS.
        handshake: This end of the handshake.
        expires: Deadline of the handshake, on the monotonic clock.
    """

    def __init__(self, sock: AnySocket, handshake: Handshake, expires: float) -> None:
        self.socket = sock
        self.handshake = handshake
        self.expires = expires
        self.reader = FrameReader(handshake.admit)
        self._unsecured = sock if isinstance(sock, TlsSocket) else None  # until TLS's own handshake is done

    def open(self) -> None:
        """Send the first frame of a connection that this end has opened.

        Raises:
            OSError: The connection could not be established.
        """
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, str(code)))
        self._secure()
        self._send(self.handshake.opening())

    def receive(self) -> None:
        """Read and answer what has arrived.

        Raises:
            OSError, FrameError: The handshake has failed.
        """
        if self._unsecured is not None:
            self._secure()
            if self.handshake.connects:
                self._send(self.handshake.opening())
        count = self.socket.recv_into(self.reader.wanted())
        if count == 0:
            raise ConnectionResetError("it closed the connection in the handshake")
        for header, body in self.reader.advance(count):
            self._send(self.handshake.receive(header, body))
            if self.handshake.done:
                return  # later frames stay in the reader

    def _secure(self) -> None:
        if self._unsecured is not None:
            self._unsecured.shake_hands()
            self._unsecured = None

    def _send(self, frame: bytes) -> None:
        if frame and self.socket.send(frame) != len(frame):
            raise FrameError("A fresh connection has no room for a handshake frame.")


class PendingConnections:
    """All pending connections of one connection loop. Belongs to the loop's thread.

    Args:
        member: This end.
        key: The job key.
        selector: Selector of the loop.
        listener: Listening socket, for an end that is called.
        callers: Ranks that may call.
        addresses: Ranks to call, with their addresses.
        call_seconds: Time limit of a call; default `HANDSHAKE_SECONDS`.
        start_with: Command that starts the called server, for the log while nobody answers.
        tls: TLS settings of this end; None for connections without TLS.

    Attributes:
        problems: Why the last connection with a rank has failed; no entry once one has succeeded.
    """

    def __init__(
        self, member: GroupMember, key: JobKey, selector: selectors.BaseSelector, *, listener: socket.socket | None,
        callers: frozenset[int], addresses: Mapping[int, tuple[str, int]], call_seconds: float | None = None,
        start_with: str = "", tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self.problems: dict[int, str] = {}
        self._member = member
        self._key = key
        self._selector = selector
        self._acceptor = None if listener is None else Acceptor(listener, selector)
        self._callers = callers
        self._addresses = addresses
        self._call_seconds = call_seconds
        self._start_with = start_with
        self._tls = tls
        self._call_at = dict.fromkeys(addresses, 0.0)
        self._pauses: dict[int, float] = {}
        self._connections: dict[AnySocket, PendingConnection] = {}
        self._num_refused = 0

    def begin_turn(self, now: float) -> None:
        """Do what is due before the selector waits."""
        for peer, at in list(self._call_at.items()):
            if now >= at:
                del self._call_at[peer]
                self._call(peer)
        if self._acceptor is not None:
            self._acceptor.resume(now)

    def deadlines(self) -> list[float]:
        """When something is due, on the monotonic clock."""
        times = [*self._call_at.values(), *(pending.expires for pending in self._connections.values())]
        if self._acceptor is not None and self._acceptor.rests_until is not None:
            times.append(self._acceptor.rests_until)
        return times

    def progress(self, source: Any) -> PendingConnection | None:
        """Handle a socket that is ready, and return its connection if that completes the handshake."""
        if self._acceptor is not None and source is self._acceptor.listener:
            self._accept()
        elif source in self._connections:  # not dropped earlier in this turn
            return self._advance(self._connections[source])
        return None

    def expire(self) -> None:
        """Drop connections whose handshake takes too long."""
        for pending in list(self._connections.values()):
            if time.monotonic() >= pending.expires:
                self._drop(pending, "it did not finish the handshake in time")

    def call_again(self, peer: int) -> None:
        """Call a rank whose proven connection is gone, if it is one to call."""
        if peer in self._addresses:
            self._call_at[peer] = time.monotonic() + self._pauses.get(peer, _FIRST_PAUSE)

    def refuse(self, sock: AnySocket, problem: str) -> None:
        """Close a connection that somebody has opened, and log that from time to time."""
        sock.close()
        self._num_refused += 1
        if self._num_refused & (self._num_refused - 1) == 0:  # 1, 2, 4, 8...: a flood does not fill the log
            logger.warning("Refused %d connections so far; the last: %s", self._num_refused, problem)

    def end(self) -> None:
        """Call and accept nobody any more."""
        self._call_at.clear()
        for pending in list(self._connections.values()):
            self._forget(pending)
            pending.socket.close()
        if self._acceptor is not None:
            self._acceptor.end()

    def release(self) -> None:
        """Close every socket, but leave the selector as it is: a forked child shares it with its parent."""
        for sock in self._connections:
            sock.close()
        if self._acceptor is not None:
            self._acceptor.listener.close()

    def _call(self, peer: int) -> None:
        host, port = self._addresses[peer]
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:  # out of descriptors
            self._call_later(peer, error.strerror or str(error))
            return
        sock.setblocking(False)
        pending = self._add(sock, frozenset({peer}), connect=True)
        try:
            code = sock.connect_ex((host, port))
            problem = "" if code in (0, errno.EINPROGRESS) else errno.errorcode.get(code, str(code))
        except OSError as error:  # no such host
            problem = str(error)
        if problem:
            self._drop(pending, problem)

    def _accept(self) -> None:
        assert self._acceptor is not None
        sock = self._acceptor.accept()
        if sock is None:
            return
        accepted = [pending for pending in self._connections.values() if not pending.handshake.connects]
        if len(accepted) >= len(self._callers) + SPARE_CONNECTIONS:
            self._drop(accepted[0], "too many unauthenticated peers at the port")
        self._add(sock, self._callers, connect=False)

    def _add(self, sock: socket.socket, expected: frozenset[int], *, connect: bool) -> PendingConnection:
        seconds = self._call_seconds if connect and self._call_seconds else HANDSHAKE_SECONDS
        handshake = Handshake(self._member, self._key, expected, connect=connect)
        stream: AnySocket = sock
        if self._tls is not None:
            stream = TlsSocket(sock, self._tls, self._addresses[min(expected)][0] if connect else None)
        pending = self._connections[stream] = PendingConnection(stream, handshake, time.monotonic() + seconds)
        self._selector.register(stream, selectors.EVENT_WRITE if connect else selectors.EVENT_READ)
        return pending

    def _advance(self, pending: PendingConnection) -> PendingConnection | None:
        try:
            if self._selector.get_key(pending.socket).events == selectors.EVENT_WRITE:
                self._selector.modify(pending.socket, selectors.EVENT_READ)
                pending.open()
            else:
                pending.receive()
        except BlockingIOError:
            return None
        except (OSError, FrameError) as error:
            self._drop(pending, str(error))
            return None
        if not pending.handshake.done:
            return None
        self._forget(pending)
        assert pending.handshake.peer is not None, "it is proven"
        self.problems.pop(pending.handshake.peer, None)
        if pending.handshake.connects:
            self._pauses.pop(pending.handshake.peer, None)
            self._start_with = ""  # the server runs
        return pending

    def _drop(self, pending: PendingConnection, problem: str) -> None:
        self._forget(pending)
        peer = pending.handshake.peer
        if pending.handshake.connects:
            assert peer is not None, "a caller knows whom it calls"
            pending.socket.close()
            self._call_later(peer, problem)
            return
        if peer is not None:
            self.problems[peer] = problem
        self.refuse(pending.socket, problem)

    def _call_later(self, peer: int, problem: str) -> None:
        self.problems[peer] = problem
        if self._start_with:  # once: without it, a worker waits in silence until its timeout
            logger.warning(
                "Nobody answers at %s:%d yet (%s); waiting. If the server is not started, start it with: %s",
                *self._addresses[peer], problem, self._start_with,
            )  # fmt: skip
            self._start_with = ""
        pause = self._pauses.get(peer, _FIRST_PAUSE)
        self._pauses[peer] = min(2 * pause, _LONGEST_PAUSE)
        self._call_at[peer] = time.monotonic() + pause

    def _forget(self, pending: PendingConnection) -> None:
        del self._connections[pending.socket]
        with contextlib.suppress(KeyError):
            self._selector.unregister(pending.socket)
