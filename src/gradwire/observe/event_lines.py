"""Lines about what a server does, written by a thread of their own.

Guarantees: whoever reports an event never waits for whoever reads it, as at the end of a pipe that nobody reads, and
an error in writing ends the lines, not the server.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from gradwire.core import threads

logger = logging.getLogger("gradwire")
MAX_LINES = 10_000
"""Lines that may wait. Further ones are dropped."""
_TURN_SECONDS = 0.25


class EventLines:
    """Passes lines on in their order.

    Args:
        write: Called with each line, on the thread.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._lines: queue.Queue[str] = queue.Queue(MAX_LINES)
        self._ended = threading.Event()
        self._thread = threads.start("gradwire-event-lines", self._run, on_error=None)

    def put(self, line: str) -> None:
        """Write a line soon. Returns at once, on any thread."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            logger.debug("Nobody takes the lines about events. Dropped: %s", line)

    def end(self) -> None:
        """Write what still waits. Limited as `gradwire.core.threads.end` is."""
        self._ended.set()
        threads.end(self._thread)

    def _run(self) -> None:
        while True:
            try:
                line = self._lines.get(timeout=_TURN_SECONDS)
            except queue.Empty:
                if self._ended.is_set():
                    return
                continue
            try:
                self._write(line)
            except Exception as error:
                logger.warning("The lines about events end here, because writing one failed: %r", error)
                return
