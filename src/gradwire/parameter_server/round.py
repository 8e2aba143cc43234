"""One parameter's open step at a server: what has been pushed for it, and when it is closed.

With a staleness of N, workers may also push for the N steps after it. These pushes wait until their step is open.
"""

# Shapes: n = workers, N = staleness.

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
    """A worker's gradient for one step.

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
        version: Number of updates so far, which is also the open step.
        staleness: Number of steps after the open one that workers may push for.

    Attributes:
        waiting: Pushes by step and worker, for the open step and later ones.
        last_pushed: Last steps for which each worker's push was taken, int64[n, N + 1], oldest first, or -1. A worker
            waits for the outcome of N + 1 pushes at most.
        last_counted: Last steps that each worker was counted in, in the same form.
    """

    workers: int
    version: int = 0
    staleness: int = 0
    waiting: dict[int, dict[int, Push]] = field(default_factory=dict)
    last_pushed: np.ndarray = field(init=False)
    last_counted: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.last_pushed = np.full((self.workers, self.staleness + 1), -1, np.int64)
        self.last_counted = self.last_pushed.copy()

    @property
    def pushes(self) -> dict[int, Push]:
        """Pushes for the open step by worker. Do not change it."""
        return self.waiting.get(self.version, {})

    @property
    def pushed(self) -> np.ndarray:
        """Last step for which each worker's push was taken, int64[n], or -1."""
        return self.last_pushed[:, -1]

    @property
    def counted(self) -> np.ndarray:
        """Last step that each worker was counted in, int64[n], or -1."""
        return self.last_counted[:, -1]

    def has(self, worker: int, step: int) -> bool:
        """Whether a worker's push for a step is waiting."""
        return worker in self.waiting.get(step, {})

    def add(self, worker: int, step: int, push: Push) -> None:
        """Take a push for the open step or one of the next `staleness` ones."""
        assert self.version <= step <= self.version + self.staleness, "checked before"
        self.waiting.setdefault(step, {})[worker] = push
        _append(self.last_pushed[worker], step)

    def take_back(self, worker: int) -> None:
        """Forget a push for the open step that does not decode."""
        del self.waiting[self.version][worker]
        steps = self.last_pushed[worker]
        steps[steps == self.version] = -1
        steps.sort()

    def due(self, needed: int, present: Collection[int]) -> bool:
        """Whether the step can be closed: enough have pushed, and no present worker has missed too much."""
        pushes = self.pushes
        if len(pushes) < needed:
            return False
        behind = np.flatnonzero(self.version - 1 - self.counted >= MAX_MISSES).tolist()
        return not any(worker in present and worker not in pushes for worker in behind)

    def close(self, counted: list[int]) -> None:
        """Begin the next step; `counted` are the workers whose gradients are in the update."""
        for worker in counted:
            _append(self.last_counted[worker], self.version)
        self.waiting.pop(self.version, None)
        self.version += 1


def _append(steps: np.ndarray, step: int) -> None:
    steps[:-1] = steps[1:].copy()
    steps[-1] = step
