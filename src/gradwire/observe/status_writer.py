"""Writes a rank's status at regular intervals, on a thread of its own, until it is closed or its process exits.

Guarantees: training never waits for it, and none of its errors reaches training: the first one is logged, and later
writes are tried again.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from gradwire.core import threads
from gradwire.observe import status_files
from gradwire.observe.status import RankStatus

logger = logging.getLogger("gradwire")
_END_SECONDS = 2.0
_open: weakref.WeakSet[StatusWriter] = weakref.WeakSet()


class StatusWriter:
    """Writes a status file until `close`.

    Args:
        path: The file. Its folder is created.
        collect: Returns the status, given how the rank has ended, or an empty text. A status that says how ends the
            writer. Called on the writer's thread.
        interval: Time between two writes.
    """

    def __init__(self, path: Path, collect: Callable[[str], RankStatus], interval: timedelta) -> None:
        self.path = path
        self._collect = collect
        self._seconds = interval.total_seconds()
        self._closing = threading.Event()
        self._end = ""
        self._failed = False
        self._thread = threads.start("gradwire-status", self._run, on_error=None)
        _open.add(self)

    def close(self, end: str) -> None:
        """Write a last time and end. Waits for a short time only. Idempotent.

        Args:
            end: How the rank has ended; see `RankStatus.end`.
        """
        if not self._closing.is_set():
            self._end = end
            self._closing.set()
            _open.discard(self)
            threads.end(self._thread, _END_SECONDS)

    def _run(self) -> None:
        self._prepare()
        while not self._write():
            self._closing.wait(self._seconds)

    def _prepare(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            status_files.remove_old(self.path.parent)
        except OSError as error:
            self._complain(error)

    def _write(self) -> bool:
        """Write once, and return whether that was the last time."""
        status = self._collect(self._end)
        try:
            status_files.write(self.path, status)
        except OSError as error:
            self._complain(error)
        return bool(status.end)

    def _complain(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("gradwire top cannot show this rank: %s cannot be written (%s).", self.path, error)


def _exit_all() -> None:
    for writer in list(_open):
        writer.close("exited")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open.clear)  # the parent writes
atexit.register(_exit_all)
