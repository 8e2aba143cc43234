"""Connections whose handshake has not ended: those that this end opens, and those that others open to it.

Guarantees: an unauthenticated peer costs one descriptor for a few seconds. Under a flood, places are shared between
source addresses (`gradwire.net.quota`), and a caller that has lost its place comes back with the answer to the
challenge that it was given (`gradwire.net.challenges`). A rank to call is called again, with growing pauses, until it
has proven itself.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import selectors
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any

from gradwire.core.errors import FrameError
from gradwire.net.acceptor import Acceptor
from gradwire.net.challenges import Challenges
from gradwire.net.handshake import Challenged, GroupMember, Handshake, HandshakeError, JobKey
from gradwire.net.quota import SourceQuota
from gradwire.net.stream import FrameReader
from gradwire.net.tls import AnySocket, TlsSocket

logger = logging.getLogger("gradwire")
# A real peer has its frames ready.
HANDSHAKE_SECONDS = 5.0
SPARE_CONNECTIONS = 256
"""Unauthenticated connections that are held at once, beyond one per expected caller."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5


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
        try:
            for header, body in self.reader.advance(count):
                self._send(self.handshake.receive(header, body))
                if self.handshake.done:
                    return  # later frames stay in the reader
        except HandshakeError as error:
            self._send(error.answer)
            raise

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
        self._proven_at: dict[int, float] = {}  # when the last call has succeeded
        self._challenged: dict[int, Challenged] = {}
        self._challenges = Challenges()
        self._called: dict[AnySocket, PendingConnection] = {}
        self._accepted: dict[AnySocket, PendingConnection] = {}  # all have the same time: the oldest expires first
        self._quota: SourceQuota[PendingConnection] = SourceQuota(len(callers) + SPARE_CONNECTIONS)
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
        times = [*self._call_at.values(), *(pending.expires for pending in self._first_to_expire())]
        if self._acceptor is not None and self._acceptor.rests_until is not None:
            times.append(self._acceptor.rests_until)
        return times

    def progress(self, source: Any) -> PendingConnection | None:
        """Handle a socket that is ready, and return its connection if that completes the handshake."""
        if self._acceptor is not None and source is self._acceptor.listener:
            self._accept()
            return None
        pending = self._called.get(source) or self._accepted.get(source)
        return None if pending is None else self._advance(pending)  # None: dropped earlier in this turn

    def expire(self) -> None:
        """Drop connections whose handshake takes too long."""
        now = time.monotonic()
        while late := [pending for pending in self._first_to_expire() if now >= pending.expires]:
            for pending in late:
                self._drop(pending, "it did not finish the handshake in time")

    def call_again(self, peer: int) -> None:
        """Call a rank whose proven connection is gone, if it is one to call. Pauses grow while none lasts."""
        if peer in self._addresses:
            now = time.monotonic()
            if now - self._proven_at.get(peer, now) >= _LONGEST_PAUSE:
                self._pauses.pop(peer, None)
            self._call_at[peer] = now + self._next_pause(peer)

    def refuse(self, sock: AnySocket, problem: str) -> None:
        """Close a connection that somebody has opened, and log that from time to time."""
        sock.close()
        self._num_refused += 1
        if self._num_refused & (self._num_refused - 1) == 0:  # 1, 2, 4, 8...: a flood does not fill the log
            logger.warning("Refused %d connections so far; the last: %s", self._num_refused, problem)

    def end(self) -> None:
        """Call and accept nobody any more."""
        self._call_at.clear()
        for pending in (*self._called.values(), *self._accepted.values()):
            self._forget(pending)
            pending.socket.close()
        if self._acceptor is not None:
            self._acceptor.end()

    def release(self) -> None:
        """Close every socket, but leave the selector as it is: a forked child shares it with its parent."""
        for sock in (*self._called, *self._accepted):
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
        seconds = self._call_seconds or HANDSHAKE_SECONDS
        before = self._challenged.pop(peer, None)
        handshake = Handshake(self._member, self._key, frozenset({peer}), connect=True, before=before)
        pending = self._add(sock, handshake, seconds, host)
        try:
            code = sock.connect_ex((host, port))
            problem = "" if code in (0, errno.EINPROGRESS) else errno.errorcode.get(code, str(code))
        except OSError as error:  # no such host
            problem = str(error)
        if problem:
            self._drop(pending, problem)

    def _accept(self) -> None:
        assert self._acceptor is not None
        accepted = self._acceptor.accept()
        if accepted is None:
            return
        sock, host = accepted
        handshake = Handshake(
            self._member, self._key, self._callers, connect=False, host=host, challenges=self._challenges
        )
        leaving = self._quota.take(host, self._add(sock, handshake, HANDSHAKE_SECONDS))
        if leaving is not None:
            self._drop(leaving, "too many unauthenticated peers at the port")

    def _add(
        self, sock: socket.socket, handshake: Handshake, seconds: float, server_name: str | None = None
    ) -> PendingConnection:
        stream: AnySocket = sock if self._tls is None else TlsSocket(sock, self._tls, server_name)
        pending = PendingConnection(stream, handshake, time.monotonic() + seconds)
        (self._called if handshake.connects else self._accepted)[stream] = pending
        self._selector.register(stream, selectors.EVENT_WRITE if handshake.connects else selectors.EVENT_READ)
        return pending

    def _first_to_expire(self) -> list[PendingConnection]:
        return [*self._called.values(), *itertools.islice(self._accepted.values(), 1)]

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
            self._proven_at[pending.handshake.peer] = time.monotonic()
            self._start_with = ""  # the server runs
        return pending

    def _drop(self, pending: PendingConnection, problem: str) -> None:
        self._forget(pending)
        peer = pending.handshake.peer
        if pending.handshake.connects:
            assert peer is not None, "a caller knows whom it calls"
            if pending.handshake.challenged is not None:
                self._challenged[peer] = pending.handshake.challenged
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
        self._call_at[peer] = time.monotonic() + self._next_pause(peer)

    def _next_pause(self, peer: int) -> float:
        pause = self._pauses.get(peer, _FIRST_PAUSE)
        self._pauses[peer] = min(2 * pause, _LONGEST_PAUSE)
        return pause

    def _forget(self, pending: PendingConnection) -> None:
        if pending.handshake.connects:
            del self._called[pending.socket]
        else:
            del self._accepted[pending.socket]
            self._quota.leave(pending)
        with contextlib.suppress(KeyError):
            self._selector.unregister(pending.socket)
