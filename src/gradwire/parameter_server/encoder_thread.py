"""The thread that encodes and sends, so that the backward goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class EncoderThread:
    """Runs what it is given, in order, on one thread. After an error it runs nothing more."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gradwire-coder", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], Any]) -> None:
        """Run `task` after all before it."""
        self._tasks.put(task)

    def drain(self) -> None:
        """Wait until all tasks so far have run.

        Raises:
            BaseException: what the first task that failed has raised.
        """
        done = threading.Event()
        self._tasks.put(done.set)
        while not done.wait(1.0) and self._thread.is_alive():
            pass
        self.check()

    def check(self) -> None:
        """Raise what a task has raised."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End after the tasks so far. Idempotent."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._error is None or getattr(task, "__self__", None).__class__ is threading.Event:
                try:
                    task()
                except BaseException as error:
                    self._error = error
