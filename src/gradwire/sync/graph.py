"""The task graph of one synchronization: CaSync's five primitives and the order between them.

A graph is data: strategies build it, the engine runs it, `TaskGraph.describe` prints it. A task becomes ready when
every task it comes after has ended; a `recv` has no code of its own and ends when its frame arrives; a task whose code
returns a future ends when that does.

Source: HiPress (SOSP 2021), section 3.1: encode, decode, merge, send and recv as composable primitives with a
dependency graph between them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gradwire.core.errors import SyncError
from gradwire.wire.frame import FrameKind

logger = logging.getLogger("gradwire")

Primitive = Literal["encode", "decode", "merge", "send", "recv"]


class FrameKey(NamedTuple):
    """Which frame a `recv` waits for. Together with the sender it is unique in a job."""

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
        kind: which primitive.
        run: what it does, for all but `recv`; its return value becomes `value`.
        key: the frame a `recv` waits for.
        phase: what to call it in messages, for example ``"recv scatter"``.
        pending: how many tasks it still waits for.
        value: the result: a payload, an arrival, what a future came to, nothing.
    """

    kind: Primitive
    graph: TaskGraph
    phase: str
    run: Callable[[], Any] | None = None
    key: FrameKey | None = None
    peer: int | None = None
    pending: int = 0
    successors: list[Task] = field(default_factory=list)
    value: Any = None
    started: float = 0.0


class TaskGraph:
    """The tasks that synchronize one item, and what to do when the last has ended.

    Args:
        name: name of the item, for messages and metrics.
        round: synchronization round.
        priority: graphs of a lower number go first.
        on_done: called once, on the engine's thread, when every task has ended.
        on_failed: called in its place, on any thread, if the engine fails or is closed before that.
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
        self.created = time.monotonic()

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
        """Add a task that ends with the arrival of a frame."""
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
                self._ended = False  # whoever hears of this calls `fail`
                raise

    def fail(self, error: SyncError) -> None:
        """Call `on_failed`, unless the graph has ended."""
        if self._end():
            try:
                self._on_failed(error)
            except Exception:  # those who wait for other graphs must still be told
                logger.exception("What waits for %s could not be told of its failure.", self.name)

    def _end(self) -> bool:
        with self._lock:
            ended, self._ended = self._ended, True
        return not ended

    def predecessors(self) -> dict[Task, list[Task]]:
        """What each task comes after."""
        after: dict[Task, list[Task]] = {task: [] for task in self.tasks}
        for task in self.tasks:
            for successor in task.successors:
                after[successor].append(task)
        return after

    def by_part(self) -> list[tuple[int, list[Task]]]:
        """Partition numbers and tasks of the ranges; tasks of one range hang together, those of two never do."""
        after, seen, parts = self.predecessors(), set[Task](), []
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
                parts.append((index, sorted(found, key=self.tasks.index)))
        return sorted(parts, key=lambda part: part[0])

    def describe(self) -> str:
        """One line a task: number, primitive, phase, peer and the numbers it comes after."""
        after, number = self.predecessors(), {task: index for index, task in enumerate(self.tasks)}
        lines = [f"{self.name} (round {self.round})"]
        for task in self.tasks:
            peer = "" if task.peer is None else f" rank {task.peer}"
            behind = f"  after {', '.join(str(number[each]) for each in after[task])}" if after[task] else ""
            lines.append(f"  {number[task]:3} {task.kind:6} {task.phase}{peer}{behind}")
        return "\n".join(lines)
