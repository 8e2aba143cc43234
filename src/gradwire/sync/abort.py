"""The end of an engine that has failed: peers and all who wait are told, and the flight recorder writes its file.

Guarantees: runs fail and peers hear of it within seconds, also if the recorder's disk hangs, or a listener of the
failure. Where the system gives no more threads, there is no file, and telling the peers may take as long as the
transport's own limit. A listener that hangs on a ``recv`` holds the transport's thread: peers then notice by silence.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gradwire.core import threads
from gradwire.core.errors import SyncError
from gradwire.core.events import Event, EventStream
from gradwire.net.transport import Transport
from gradwire.sync.run import Run

logger = logging.getLogger("gradwire")

_PATIENCE_SECONDS = 2.0


class Abort:
    """Ends an engine, on threads of its own: the one that fails may be the transport's, which cannot wait for itself.

    Args:
        transport: Transport whose peers are told.
        events: Stream of metrics.
        on_failure: Writes the flight recorder's file, from the error and the state at that moment.
    """

    def __init__(
        self, transport: Transport, events: EventStream, on_failure: Callable[[SyncError, dict[str, Any]], None]
    ) -> None:
        self._transport = transport
        self._events = events
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None

    def begin(self, error: SyncError, state: dict[str, Any], runs: Sequence[Run]) -> None:
        """Begin to fail `runs` and peers with `error`. Call it once."""
        tell = partial(self._tell, error, state, runs)
        try:
            self._thread = threads.start("gradwire-abort", tell, on_error=None)
        except RuntimeError:  # the system gives no more threads
            tell()

    def wait_until_told(self) -> None:
        """Wait until the peers know which rank failed, for at most two seconds. The caller may end its process then."""
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)

    def end(self) -> None:
        """Wait for the thread, within the limit of `threads.end`."""
        if self._thread is not None:
            threads.end(self._thread)

    def _tell(self, error: SyncError, state: dict[str, Any], runs: Sequence[Run]) -> None:
        reason = str(error)
        report = partial(self._report, error, reason, state)
        reporting = threads.make("gradwire-flight-recorder", report, on_error=None)
        try:
            reporting.start()
        except RuntimeError:  # the system gives no more threads
            logger.exception("The flight recorder's file is not written.")
        try:
            self._transport.abort(reason, error.rank)
        finally:
            threads.end(reporting, _PATIENCE_SECONDS)
            for run in runs:
                run.fail(error)

    def _report(self, error: SyncError, reason: str, state: dict[str, Any]) -> None:
        detail = {"message": reason}
        event = Event("failure", time.monotonic(), tensor=error.tensor or "", peer=error.rank, detail=detail)
        self._events.keep(event)  # for the recorder's file
        try:
            self._on_failure(error, state)
        finally:
            self._events.tell(event)  # last, because a listener may hang
