"""Errors of the engine: those that it raises itself, and the tensor and phase that it adds to others."""

from __future__ import annotations

from gradwire.core.errors import NO_TENSOR, PeerTimeoutError, SyncError
from gradwire.sync.graph import FrameKey, Task


def closed() -> SyncError:
    """Return the error of calls on a closed engine."""
    return SyncError(
        "This synchronizer is closed. Call wait() for everything submitted before close() or detach(), and make a new "
        "one to go on.",
        tensor=NO_TENSOR,
        phase="closed",
    )


def stalled(task: Task, waited: float, limit: float) -> PeerTimeoutError:
    """Return the error of a task that has waited too long: for a frame of a live rank, or for a reply.

    Args:
        task: Task that waits.
        waited: Seconds that it has waited.
        limit: Stall timeout in seconds.
    """
    graph = task.graph
    if task.peer is None:
        late = (
            f"Nothing has answered {task.phase} (tensor {graph.name}, round {graph.round}) for {waited:.1f} s "
            f"(limit {limit:g} s). Check what the other end does between steps"
        )
    else:
        late = (
            f"Rank {task.peer} is alive, but this rank has waited {waited:.1f} s for a frame from it (limit {limit:g} "
            "s). Check what that rank does between steps"
        )
    return PeerTimeoutError(
        f"{late}, or pass a larger stall_timeout.", rank=task.peer, tensor=graph.name, phase=task.phase
    )


def sent_twice(key: FrameKey) -> SyncError:
    """Return the error of a frame that has come twice."""
    return SyncError(
        f"Rank {key.peer} sent a frame twice: {key.kind.name} of tensor number {key.tensor}, partition "
        f"{key.partition}, stage {key.stage}, round {key.round}. Run one gradwire version on all ranks; if you do, "
        "report this.",
        rank=key.peer,
        phase="recv",
    )


def located(error: SyncError, waiting: list[Task]) -> SyncError:
    """Add the tensor and phase that were waited for to an error that lacks them.

    Args:
        error: Error to complete.
        waiting: Tasks that wait for a frame or a reply.
    """
    if error.tensor is None:
        tasks = [task for task in waiting if error.rank in (None, task.peer)] or waiting
        if tasks:
            _locate(error, min(tasks, key=lambda task: (task.graph.round, task.started)))
        else:
            error.tensor, error.phase = NO_TENSOR, error.phase or "between steps"
            error.args = (f"{error} ({error.phase})",)
    return error


def raised(error: BaseException, task: Task) -> SyncError:
    """Return the error of a task as a `SyncError` that names tensor and phase."""
    graph = task.graph
    if isinstance(error, SyncError):
        if error.tensor is None:
            _locate(error, task)
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


def _locate(error: SyncError, task: Task) -> None:
    error.tensor, error.phase = task.graph.name, task.phase
    error.args = (f"{error} (tensor {task.graph.name}, {task.phase}, round {task.graph.round})",)
