"""The errors that an engine itself raises."""

from __future__ import annotations

from gradwire.core.errors import SyncError
from gradwire.sync.graph import Task


def closed() -> SyncError:
    """What calls of a closed engine raise."""
    return SyncError(
        "Expected an open synchroniser, got one that was closed. Do: wait() for what was submitted before close() or "
        "detach(), and make a new one to go on.",
        tensor="none",
        phase="closed",
    )


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
