"""The task graph of one synchronization: CaSync's five primitives and the order between them.

Strategies build a graph, the engine runs it, and `gradwire.sync.drawing` prints it. A task is ready when all its
predecessors have ended. A `recv` task has no code: it ends when its frame arrives. A task whose code returns a future
ends when the future does.

Source: HiPress (SOSP 2021), section 3.1: encode, decode, merge, send and recv as composable primitives with a
dependency graph between them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gradwire.core.errors import SyncError
from gradwire.wire.frame import FrameKind

logger = logging.getLogger("gradwire")

Primitive = Literal["encode", "decode", "merge", "send", "recv"]


class FrameKey(NamedTuple):
    """The frame that a `recv` waits for. Unique within a job."""

    peer: int
    kind: FrameKind
    round: int
    tensor: int
    stage: int
    partition: int


@dataclass(eq=False, slots=True)
class Task:
    """One primitive.

    Attributes:
        kind: Primitive.
        graph: Graph of the task.
        phase: Name for messages and traces, for example ``"recv scatter"``.
        run: Code of the task; None for `recv`. Its return value becomes `value`.
        key: Frame that a `recv` waits for.
        peer: Other rank of a `send` or `recv`.
        pending: Number of tasks that this task still waits for.
        successors: Tasks that wait for this task.
        is_last: Whether this is the task that the engine adds to end the graph.
        value: Result: an encoded chunk, a received frame, the result of a future, or None.
        started: When the task began to wait, in seconds of the monotonic clock.
    """

    kind: Primitive
    graph: TaskGraph
    phase: str
    run: Callable[[], Any] | None = None
    key: FrameKey | None = None
    peer: int | None = None
    pending: int = 0
    is_last: bool = False
    successors: list[Task] = field(default_factory=list)
    value: Any = None
    started: float = 0.0


class TaskGraph:
    """The tasks that synchronize one job, and callbacks for its end.

    Args:
        name: Name of the job, for messages and metrics.
        round: Synchronization round.
        priority: Priority; graphs with lower numbers go first.
        on_done: Called once, on the engine's thread, when every task has ended.
        on_failed: Called instead, on any thread, if the engine fails or is closed before that.
    """

    def __init__(
        self,
        name: str,
        round: int,
        priority: int,
        on_done: Callable[[], None],
        on_failed: Callable[[SyncError], None] = lambda error: None,
    ) -> None:
        self.name = name
        self.round = round
        self.priority = priority
        self._on_done = on_done
        self._on_failed = on_failed
        self._ended = False
        self._lock = threading.Lock()
        self.tasks: list[Task] = []
        self.remaining = 0

    def add(
        self,
        kind: Primitive,
        phase: str,
        run: Callable[[], Any],
        after: Iterable[Task] = (),
        peer: int | None = None,
    ) -> Task:
        """Add a task that runs after all of `after`."""
        return self._insert(Task(kind, self, phase, run, peer=peer), after)

    def recv(self, phase: str, key: FrameKey) -> Task:
        """Add a task that ends when a frame arrives."""
        return self._insert(Task("recv", self, phase, key=key, peer=key.peer), ())

    def _insert(self, task: Task, after: Iterable[Task]) -> Task:
        for earlier in after:
            earlier.successors.append(task)
            task.pending += 1
        self.tasks.append(task)
        self.remaining += 1
        return task

    def finish(self) -> None:
        """Call `on_done`, unless the graph has failed."""
        if self._end():
            try:
                self._on_done()
            except Exception:
                self._ended = False  # the engine calls `fail` next
                raise

    def fail(self, error: SyncError) -> None:
        """Call `on_failed`, unless the graph has ended."""
        if self._end():
            try:
                self._on_failed(error)
            except Exception:  # callers that wait for other graphs must still be notified
                logger.exception("The failure callback of %s raised an error.", self.name)

    def _end(self) -> bool:
        with self._lock:
            ended, self._ended = self._ended, True
        return not ended

    def predecessors(self) -> dict[Task, list[Task]]:
        """Return the tasks that each task comes after."""
        after: dict[Task, list[Task]] = {task: [] for task in self.tasks}
        for task in self.tasks:
            for successor in task.successors:
                after[successor].append(task)
        return after

    def by_chunk(self) -> list[tuple[int, list[Task]]]:
        """Return the tasks of each chunk, with its index. These are the connected components of the graph."""
        after, seen, chunks = self.predecessors(), set[Task](), []
        for first in self.tasks:
            found, edge = [], [first]
            while edge:
                task = edge.pop()
                if task not in seen:
                    seen.add(task)
                    found.append(task)
                    edge += [*task.successors, *after[task]]
            if found:
                index = next((task.key.partition for task in found if task.key is not None), 0)
                chunks.append((index, sorted(found, key=self.tasks.index)))
        return sorted(chunks, key=lambda chunk: chunk[0])
