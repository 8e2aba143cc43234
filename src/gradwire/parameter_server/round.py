"""One parameter's open step at a server: what has been pushed for it, and when it is closed."""

# Shapes: n = workers.

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from gradwire.parameter_server.session import Groups
from gradwire.wire.frame import FrameFlags

MAX_MISSES = 16
"""Number of updates in a row that a worker may miss before it is waited for."""


@dataclass(frozen=True)
class Push:
    """A worker's gradient for the open step.

    Attributes:
        flags: Flags of the frame.
        body: Body of the frame; empty if the worker did not use the parameter.
        groups: Hyperparameters that the worker had sent before.
    """

    flags: FrameFlags
    body: np.ndarray
    groups: Groups

    @property
    def finite(self) -> bool:
        return not self.flags & FrameFlags.NONFINITE


@dataclass
class Round:
    """Version of one parameter, and the pushes for its next one.

    Args:
        workers: Number of workers.

    Attributes:
        version: Number of updates so far, which is also the open step.
        pushes: Pushes for the open step by worker.
        pushed: Last step that each worker has pushed for, int64[n], or -1.
        counted: Last step that each worker was counted in, int64[n], or -1.
    """

    workers: int
    version: int = 0
    pushes: dict[int, Push] = field(default_factory=dict)
    pushed: np.ndarray = field(init=False)
    counted: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.pushed = np.full(self.workers, -1, np.int64)
        self.counted = np.full(self.workers, -1, np.int64)

    def add(self, worker: int, push: Push) -> None:
        """Take a push for the open step."""
        self.pushes[worker] = push
        self.pushed[worker] = self.version

    def take_back(self, worker: int) -> None:
        """Forget a push that does not decode."""
        del self.pushes[worker]
        self.pushed[worker] = -1

    def due(self, needed: int, present: Collection[int]) -> bool:
        """Whether the step can be closed: enough have pushed, and no present worker has missed too much."""
        behind = np.flatnonzero(self.version - 1 - self.counted >= MAX_MISSES).tolist()
        return len(self.pushes) >= needed and not any(
            worker in present and worker not in self.pushes for worker in behind
        )

    def close(self, counted: list[int]) -> None:
        """Begin the next step; `counted` are the workers whose gradients are in the update."""
        self.counted[counted] = self.version
        self.version += 1
        self.pushes = {}
