"""Connections of a hub that are not proven yet: those that it makes, and those that others make to it.

Guarantees: strangers cost a descriptor for a few seconds; the rank to be called is called again, less and less often,
until it has proven itself.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import time
from typing import Any

from gradwire.core.errors import FrameError
from gradwire.net.acceptor import Acceptor
from gradwire.net.handshake import GroupMember, Handshake, JobKey
from gradwire.net.pending_connection import HANDSHAKE_SECONDS, PendingConnection

logger = logging.getLogger("gradwire")
SPARE_CANDIDATES = 64
_FIRST_RETRY, _LONGEST_RETRY = 0.05, 1.0


class PendingConnections:
    """What a hub has of connections until they are proven. Belongs to the hub's thread.

    Args:
        member: who this end is.
        key: the job key.
        selector: the hub's.
        listener: listening socket, for an end that is called.
        callers: the ranks that may call.
        call: rank and address to call.
        start_with: the command that starts whoever is called, for the log while nobody answers.

    Attributes:
        problem: why the last call has failed; empty once one has not.
    """

    def __init__(
        self, member: GroupMember, key: JobKey, selector: selectors.BaseSelector, *, listener: socket.socket | None,
        callers: frozenset[int], call: tuple[int, tuple[str, int]] | None, start_with: str = "",
    ) -> None:  # fmt: skip
        self.problem = ""
        self._member = member
        self._key = key
        self._selector = selector
        self._listener = listener
        self._acceptor = None if listener is None else Acceptor(listener, selector)
        self._callers = callers
        self._call = call
        self._start_with = start_with
        self._call_at: float | None = 0.0 if call else None
        self._pause = _FIRST_RETRY
        self._candidates: dict[socket.socket, PendingConnection] = {}
        self._strangers = 0

    def begin_turn(self, now: float) -> None:
        """Do what is due before the selector waits."""
        if self._call_at is not None and now >= self._call_at:
            self._call_at = None
            self._dial()
        if self._acceptor is not None:
            self._acceptor.resume(now)

    def deadlines(self) -> list[float]:
        """When something is due, on the monotonic clock."""
        times = [candidate.expires for candidate in self._candidates.values()]
        times += [] if self._call_at is None else [self._call_at]
        rests_until = None if self._acceptor is None else self._acceptor.rests_until
        return times if rests_until is None else [*times, rests_until]

    def progress(self, source: Any) -> PendingConnection | None:
        """Go on with a socket that the selector has named; return the connection that is proven now, if one is."""
        if source is self._listener:
            self._answer()
        elif source in self._candidates:  # not dropped earlier in this turn
            return self._hear(self._candidates[source])
        return None

    def expire(self) -> None:
        """Drop who takes too long."""
        for candidate in list(self._candidates.values()):
            if time.monotonic() >= candidate.expires:
                self._drop(candidate, "it did not finish the handshake in time")

    def lost(self, peer: int) -> None:
        """Call a rank again whose proven connection is gone, if it is the one to be called."""
        if self._call is not None and self._call[0] == peer:
            self._call_at = time.monotonic() + self._pause

    def release(self) -> None:
        """Close every socket."""
        for sock in self._candidates:
            sock.close()
        if self._listener is not None:
            self._listener.close()

    def _dial(self) -> None:
        assert self._call is not None
        peer, (host, port) = self._call
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:  # out of descriptors
            self._call_later(error.strerror or str(error))
            return
        sock.setblocking(False)
        handshake = Handshake(self._member, self._key, frozenset({peer}), connect=True)
        candidate = PendingConnection(sock, handshake, time.monotonic() + HANDSHAKE_SECONDS)
        self._candidates[sock] = candidate
        try:
            code = sock.connect_ex((host, port))
            problem = "" if code in (0, errno.EINPROGRESS) else errno.errorcode.get(code, str(code))
        except OSError as error:  # no such host
            problem = str(error)
        self._selector.register(sock, selectors.EVENT_WRITE)
        if problem:
            self._drop(candidate, problem)

    def _answer(self) -> None:
        assert self._acceptor is not None
        sock = self._acceptor.accept()
        if sock is None:
            return
        if len(self._candidates) >= len(self._callers) + SPARE_CANDIDATES:
            self._drop(next(iter(self._candidates.values())), "too many strangers at the port")
        handshake = Handshake(self._member, self._key, self._callers, connect=False)
        self._candidates[sock] = PendingConnection(sock, handshake, time.monotonic() + HANDSHAKE_SECONDS)
        self._selector.register(sock, selectors.EVENT_READ)

    def _hear(self, candidate: PendingConnection) -> PendingConnection | None:
        try:
            if self._selector.get_key(candidate.socket).events == selectors.EVENT_WRITE:
                code = candidate.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, errno.errorcode.get(code, str(code)))
                self._selector.modify(candidate.socket, selectors.EVENT_READ)
                candidate.say(candidate.handshake.opening())
            else:
                candidate.hear()
        except BlockingIOError:
            return None
        except (OSError, FrameError) as error:
            self._drop(candidate, str(error))
            return None
        if not candidate.handshake.done:
            return None
        self._forget(candidate)
        if candidate.handshake.connects:
            self._start_with = ""  # it is started
            self._pause = _FIRST_RETRY
            self.problem = ""
        return candidate

    def _drop(self, candidate: PendingConnection, problem: str) -> None:
        self._forget(candidate)
        candidate.socket.close()
        if candidate.handshake.connects:
            self._call_later(problem)
            return
        self._strangers += 1
        if self._strangers & (self._strangers - 1) == 0:  # 1, 2, 4, 8...: a flood does not fill the log
            logger.warning("Refused %d connections so far; the last: %s", self._strangers, problem)

    def _call_later(self, problem: str) -> None:
        self.problem = problem
        if self._start_with:  # once: whoever waits for it is silent until the timeout
            assert self._call is not None, "it is called"
            host, port = self._call[1]
            logger.warning(
                "Nobody answers at %s:%d yet (%s); waiting. If the server is not started, start it with: %s",
                host, port, problem, self._start_with,
            )  # fmt: skip
            self._start_with = ""
        self._call_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_RETRY)

    def _forget(self, candidate: PendingConnection) -> None:
        del self._candidates[candidate.socket]
        with contextlib.suppress(KeyError):
            self._selector.unregister(candidate.socket)
