"""A thread that encodes and sends gradients while the backward pass goes on.

When the interpreter exits, submitted tasks are run first. A thread that is in torch's code when the interpreter is gone
ends the process with an abort.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from gradwire.core import threads
from gradwire.core.errors import SyncError

_LOOK_SECONDS = 1.0


class EncoderThread:
    """Runs tasks in order on one thread. After an error it runs no more of them.

    Args:
        on_error: Called on the thread with the error.
    """

    def __init__(self, on_error: Callable[[SyncError], object] = lambda error: None) -> None:
        self._on_error = on_error
        self._tasks: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._num_done = 0
        self._error: SyncError | None = None
        self._thread = threads.start("gradwire-encoder", self._run, self._fail)
        _running.add(self)

    def submit(self, task: Callable[[], Any]) -> None:
        """Run `task` after all earlier ones."""
        self._tasks.put(task)

    def drain(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until all submitted tasks have run.

        Args:
            check: Called from time to time. Raises an error if waiting has become pointless.

        Raises:
            SyncError: A task has failed. The cause is its exception, unless that is a `SyncError` itself.
        """
        done = threading.Event()
        self._tasks.put(done.set)
        while self._thread.is_alive() and not done.wait(_LOOK_SECONDS):
            check()
        self.check()

    def check(self) -> None:
        """Raise the error of the first task that failed."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Run the submitted tasks and end the thread. Idempotent."""
        self._tasks.put(None)
        threads.end(self._thread, progress=lambda: self._num_done)

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=threads.WAKE_SECONDS)
            except queue.Empty:
                continue
            if task is None:
                return
            task()
            self._num_done += 1

    def _fail(self, error: SyncError) -> None:
        self._error = error
        self._on_error(error)


_running: weakref.WeakSet[EncoderThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for each in list(_running):
        each.close()
