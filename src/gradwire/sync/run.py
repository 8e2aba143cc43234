"""A run: the operations of one job on their way through the engine, with what this step fills in."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np

from gradwire.core.errors import SyncError
from gradwire.sync.chunk import Chunk
from gradwire.sync.operations import Operations
from gradwire.wire.payload import Payload

logger = logging.getLogger("gradwire")


class Run:
    """One job in one step.

    Args:
        operations: What to do.
        codec: Has the methods that the operations call, each with the arguments (chunk, results of the inputs, stage).
        name: Name of the job, for messages and metrics.
        round: Number of the job, the same on all ranks.
        priority: Runs with lower numbers go first.

    Attributes:
        pending: How much each operation still waits for.
        results: Result of each operation: a payload, the result of a future, or None. None as well once no operation
            needs it any more, so that nothing is kept longer than that.
        num_users: How many operations still need each result.
        remaining: Number of operations that have not ended.
        started: When the run began, in seconds of the monotonic clock.
    """

    def __init__(self, operations: Operations, codec: Any, name: str, round: int, priority: int = 0) -> None:
        self.operations = operations
        self.codec = codec
        self.name = name
        self.round = round
        self.priority = priority
        self.pending = operations.pending.copy()
        self.num_users = operations.num_users.copy()
        self.results: list[Any] = [None] * len(operations.ops)
        self.remaining = len(operations.ops)
        self.started = 0.0
        self._ended = False
        self._lock = threading.Lock()

    def destination(self, chunk: Chunk, nbytes: int) -> np.ndarray | None:
        """Return memory that the mean of a chunk can be received in, uint8 of this size, or None for other memory.

        Called for frames that are only decoded, to overwrite the gradient.
        """
        return None

    def lends(self, payload: Payload) -> bool:
        """Whether a payload that is sent is memory of the caller, so that the run ends only when it has been sent."""
        return False

    def on_done(self) -> None:
        """Called once, on a thread of the engine, when every operation has ended."""

    def on_failed(self, error: SyncError) -> None:
        """Called instead, on any thread, if the engine fails or is closed before that."""

    def finish(self) -> None:
        """Call `on_done`, unless the run has failed."""
        if self._end():
            try:
                self.on_done()
            except BaseException:
                self._ended = False  # the engine calls `fail` next
                raise

    def fail(self, error: SyncError) -> None:
        """Call `on_failed`, unless the run has ended."""
        if self._end():
            try:
                self.on_failed(error)
            except BaseException:  # callers that wait for other runs must still be notified
                logger.exception("The failure callback of %s raised an error.", self.name)

    def _end(self) -> bool:
        with self._lock:
            ended, self._ended = self._ended, True
        return not ended
