"""A thread that encodes and sends gradients while the backward pass goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class EncoderThread:
    """Runs tasks in order on one thread. After an error it runs no more of them."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], Any] | threading.Event | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gradwire-encoder", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], Any]) -> None:
        """Run `task` after all earlier ones."""
        self._tasks.put(task)

    def drain(self) -> None:
        """Wait until all submitted tasks have run.

        Raises:
            BaseException: The error of the first task that failed.
        """
        done = threading.Event()
        self._tasks.put(done)
        while not done.wait(1.0) and self._thread.is_alive():
            pass
        self.check()

    def check(self) -> None:
        """Raise the error of the first task that failed."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Run the submitted tasks and end the thread. Idempotent."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, threading.Event):
                task.set()
            elif self._error is None:
                try:
                    task()
                except BaseException as error:
                    self._error = error
