"""Threads: one way to start one, and one way to wait for its end.

Guarantees: an exception that ends a thread is logged with its cause, and its owner is told, so that nobody waits for
what the thread would have done. Waiting for the end of a thread has a limit, and what holds the thread up is logged.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable

from gradwire.core.errors import SyncError

logger = logging.getLogger("gradwire")
END_SECONDS = 10.0
"""Limit of `end` for a thread that has nothing left to do."""
WAKE_SECONDS = 30.0
"""Longest sleep of a thread that waits for work. Waits that others end are limited too, should nobody end them."""


def make(name: str, run: Callable[[], object], on_error: Callable[[SyncError], object] | None) -> threading.Thread:
    """Return a daemon thread that is not started.

    Args:
        name: Name of the thread; begins with "gradwire-".
        run: What the thread does.
        on_error: Called on the thread with the exception that ends it: a `SyncError` as it is, and any other as the
            cause of one. Fails the futures and calls that wait for the thread. None if nobody does.
    """

    def guarded() -> None:
        try:
            run()
        except BaseException as cause:  # whatever it is, somebody may wait for this thread
            error = failure(name, cause)
            try:
                (on_error or _log)(error)
            except BaseException:
                logger.exception("Whoever was told of this failure raised an error: %s", error)

    return threading.Thread(target=guarded, name=name, daemon=True)


def start(name: str, run: Callable[[], object], on_error: Callable[[SyncError], object] | None) -> threading.Thread:
    """Start a daemon thread and return it. See `make`."""
    thread = make(name, run, on_error)
    thread.start()
    return thread


def end(thread: threading.Thread, seconds: float = END_SECONDS, progress: Callable[[], object] = lambda: None) -> bool:
    """Wait until a thread has ended. If it has not within the limit, log where it stands, and leave it behind.

    Args:
        thread: A thread that has been told to end. The calling thread and threads that were never started count as
            ended.
        seconds: Limit.
        progress: While what it returns changes, the limit begins again.

    Returns:
        Whether the thread has ended.
    """
    if thread is threading.current_thread():
        return True
    seen, now = object(), progress()
    while thread.is_alive() and now != seen:
        thread.join(seconds)
        seen, now = now, progress()
    if not thread.is_alive():
        return True
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "(unknown)\n"
    logger.warning(
        "The thread %s has not ended within %g s, and is left behind. It stands at:\n%s", thread.name, seconds, stack
    )
    return False


def failure(name: str, cause: BaseException) -> SyncError:
    """Return what ended the thread `name`, as the error of whoever waits for it. Logs all but a `SyncError`."""
    if isinstance(cause, SyncError):
        return cause
    logger.error("The thread %s failed.", name, exc_info=cause)
    error = SyncError(f"The thread {name} failed: {cause!r}. The log says where.")
    error.__cause__ = cause
    return error


def _log(error: SyncError) -> None:
    if error.__cause__ is None:
        logger.error("A thread ended with an error.", exc_info=error)
