"""A listening socket in a selector's loop, which rests while the process is out of descriptors.

A connection that cannot be accepted stays in the queue and keeps the socket readable. A loop that tries again at once
takes most of a core for as long as the shortage lasts.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time

logger = logging.getLogger("gradwire")
REST_SECONDS = 0.25
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Accepts connections for one selector.

    Args:
        listener: listening socket; its owner closes it.
        selector: loop that says when somebody calls.

    Attributes:
        rests_until: time on the monotonic clock at which `resume` listens again; None while it listens.
    """

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        self.rests_until: float | None = None
        self._listener = listener
        self._selector = selector
        self._told = False
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)

    def accept(self) -> socket.socket | None:
        """Return the next connection, non-blocking; None where there is none, or no descriptor for it."""
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _SHORTAGES:
                self._rest(error)
            return None  # otherwise it was gone before it was answered
        sock.setblocking(False)
        return sock

    def resume(self, now: float) -> None:
        """Listen again once the rest is over."""
        if self.rests_until is not None and now >= self.rests_until:
            self.rests_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _rest(self, error: OSError) -> None:
        self._selector.unregister(self._listener)
        self.rests_until = time.monotonic() + REST_SECONDS
        if not self._told:
            self._told = True
            logger.warning(
                "A connection could not be accepted (%s); it waits until there is room. If this lasts, raise the limit "
                "of open files (ulimit -n), or look for what holds them open.",
                error.strerror or error,
            )
