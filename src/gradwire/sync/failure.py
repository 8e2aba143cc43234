"""The errors that an engine itself raises."""

from __future__ import annotations

from gradwire.core.errors import PeerTimeoutError, SyncError
from gradwire.sync.graph import Task


def closed() -> SyncError:
    """What calls of a closed engine raise."""
    return SyncError(
        "Expected an open synchronizer, got one that was closed. Do: wait() for what was submitted before close() or "
        "detach(), and make a new one to go on.",
        tensor="none",
        phase="closed",
    )


def stalled(task: Task, waited: float, limit: float) -> PeerTimeoutError:
    """What ends a task that has waited too long: for a frame of a rank that is alive, or for an answer.

    Args:
        task: what waits.
        waited: seconds so far.
        limit: the stall timeout in seconds.
    """
    graph = task.graph
    late = (
        f"Nothing has answered {task.phase} (tensor {graph.name}, round {graph.round}) for {waited:.1f} s"
        if task.peer is None
        else f"Rank {task.peer} is alive but has not sent a frame that is waited for since {waited:.1f} s"
    )
    return PeerTimeoutError(
        f"{late} (limit {limit:g} s). Look what {'the other end' if task.peer is None else 'that rank'} does between "
        "steps, or pass a larger stall_timeout.",
        rank=task.peer,
        tensor=graph.name,
        phase=task.phase,
    )


def located(error: SyncError, waiting: list[Task]) -> SyncError:
    """The same error with the tensor and the phase that were waited for, where it lacks them.

    Args:
        error: to be completed.
        waiting: tasks that wait for a frame or an answer.
    """
    if error.tensor is None:
        tasks = [task for task in waiting if error.rank in (None, task.peer)] or waiting
        if tasks:
            task = min(tasks, key=lambda task: (task.graph.round, task.started))
            error.tensor, error.phase = task.graph.name, task.phase
            where = f"(tensor {task.graph.name}, {task.phase}, round {task.graph.round})"
        else:
            error.tensor, error.phase = "none", error.phase or "between steps"
            where = f"(tensor none, {error.phase})"
        error.args = (f"{error} {where}",)
    return error


def raised(error: BaseException, task: Task) -> SyncError:
    """What a task has raised, with the task's whereabouts."""
    graph = task.graph
    if isinstance(error, SyncError):
        if error.tensor is None:
            error.tensor, error.phase = graph.name, task.phase
            error.args = (f"{error} (tensor {graph.name}, {task.phase}, round {graph.round})",)
        return error
    blame = "" if task.peer is None else f" of rank {task.peer}"
    wrapped = SyncError(
        f"{type(error).__name__} in {task.phase}{blame} (tensor {graph.name}, round {graph.round}): {error}",
        rank=task.peer,
        tensor=graph.name,
        phase=task.phase,
    )
    wrapped.__cause__ = error
    return wrapped
