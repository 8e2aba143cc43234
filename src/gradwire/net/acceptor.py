"""A listening socket that pauses while the process is out of file descriptors.

A connection that cannot be accepted stays in the queue and keeps the socket readable. A loop that tries again at once
takes most of a core for as long as the shortage lasts.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import time

logger = logging.getLogger("gradwire")
BACKLOG = 1024
"""Connections that may wait in the kernel to be accepted. It may allow fewer (net.core.somaxconn)."""
REST_SECONDS = 0.25
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Accepts the connections of one listening socket for one selector.

    Args:
        listener: Listening socket.
        selector: Selector that reports new connections.

    Attributes:
        listener: The listening socket.
        rests_until: Time on the monotonic clock at which `resume` accepts again; None while it accepts.
    """

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        self.listener = listener
        self.rests_until: float | None = None
        self._selector = selector
        self._warned = False
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)

    def accept(self) -> tuple[socket.socket, str] | None:
        """Return the next connection, non-blocking, and the address that it comes from.

        None if there is none, or no descriptor for it.
        """
        try:
            sock, (host, *_) = self.listener.accept()
        except OSError as error:
            if error.errno in _SHORTAGES:
                self._rest(error)
            return None  # otherwise the peer has gone already
        sock.setblocking(False)
        return sock, host

    def resume(self, now: float) -> None:
        """Accept again once the pause is over."""
        if self.rests_until is not None and now >= self.rests_until:
            self.rests_until = None
            self._selector.register(self.listener, selectors.EVENT_READ)

    def end(self) -> None:
        """Close the listening socket."""
        self.rests_until = None
        with contextlib.suppress(KeyError):
            self._selector.unregister(self.listener)
        self.listener.close()

    def _rest(self, error: OSError) -> None:
        self._selector.unregister(self.listener)
        self.rests_until = time.monotonic() + REST_SECONDS
        if not self._warned:
            self._warned = True
            logger.warning(
                "A connection could not be accepted (%s); it waits until there is room. If this lasts, raise the limit "
                "of open files (ulimit -n), or look for what holds them open.",
                error.strerror or error,
            )
