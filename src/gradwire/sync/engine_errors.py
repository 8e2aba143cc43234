"""Errors of the engine: those that it raises itself, and the tensor and phase that it adds to others."""

from __future__ import annotations

import os
from typing import NamedTuple

from gradwire.core.errors import NO_TENSOR, PeerTimeoutError, SyncError
from gradwire.sync.operations import Op
from gradwire.sync.run import Run
from gradwire.wire.frame import Header


class Waiting(NamedTuple):
    """An operation that waits for a frame or a reply, since `started` seconds of the monotonic clock."""

    run: Run
    op: Op
    started: float


def closed() -> SyncError:
    """Return the error of calls on a closed engine."""
    return SyncError(
        "This synchronizer is closed. Call wait() for everything submitted before close() or detach(), and make a new "
        "one to go on.",
        tensor=NO_TENSOR,
        phase="closed",
    )


def stalled(waiting: Waiting, waited: float, limit: float) -> PeerTimeoutError:
    """Return the error of an operation that has waited too long: for a frame of a live rank, or for a reply.

    Args:
        waiting: What waits.
        waited: Seconds that it has waited.
        limit: Stall timeout in seconds.
    """
    run, op, _ = waiting
    if op.peer is None:
        late = (
            f"Nothing has answered {op.phase} (tensor {run.name}, round {run.round}) for {waited:.1f} s "
            f"(limit {limit:g} s). Check what the other end does between steps"
        )
    elif op.kind == "send":
        late = (
            f"Rank {op.peer} is alive, but has not taken a frame from this rank for {waited:.1f} s (limit {limit:g} "
            "s). Check the network between these ranks"
        )
    else:
        late = (
            f"Rank {op.peer} is alive, but this rank has waited {waited:.1f} s for a frame from it (limit {limit:g} "
            "s). Check what that rank does between steps"
        )
    return PeerTimeoutError(f"{late}, or pass a larger stall_timeout.", rank=op.peer, tensor=run.name, phase=op.phase)


def stuck(run: Run, waited: float) -> SyncError:
    """Return the error of an operation of this rank that does not end. `run` is the oldest, for `waited` seconds."""
    return SyncError(
        f"No operation of this rank has ended for {waited:.1f} s, and none waits for another rank (tensor {run.name}, "
        f"round {run.round}). Look for a compressor or a kernel that does not return.",
        tensor=run.name,
        phase="compute",
    )


def forked() -> SyncError:
    """Return the error of all calls in a forked child, which has none of the threads."""
    return SyncError(
        f"Process {os.getpid()} is a fork of the one that called attach, and has no thread that could average "
        "anything. After a fork, use gradwire in the parent alone.",
        tensor=NO_TENSOR,
        phase="fork",
    )


def sent_twice(header: Header) -> SyncError:
    """Return the error of a frame that has come twice."""
    return SyncError(
        f"Rank {header.sender} sent a frame twice: {header.kind.name} of tensor number {header.tensor}, partition "
        f"{header.partition}, stage {header.stage}, round {header.round}. Run one gradwire version on all ranks; if "
        "you do, report this.",
        rank=header.sender,
        phase="recv",
    )


def unasked(peer: int, run: str) -> SyncError:
    """Return the error of a frame that a run has no use for."""
    return SyncError(
        f"Rank {peer} sent something else than a part of {run} that this rank waits for. Make the same gradwire calls "
        "on every rank, with the same tensors in the same order.",
        rank=peer,
        tensor=run,
        phase="recv",
    )


def located(error: SyncError, waiting: list[Waiting]) -> SyncError:
    """Add the tensor and phase that were waited for to an error that lacks them.

    Args:
        error: Error to complete.
        waiting: What waits for a frame or a reply.
    """
    if error.tensor is None:
        suspects = [each for each in waiting if error.rank in (None, each.op.peer)] or waiting
        if suspects:
            first = min(suspects, key=lambda each: (each.run.round, each.started))
            _locate(error, first.run, first.op)
        else:
            error.tensor, error.phase = NO_TENSOR, error.phase or "between steps"
            error.args = (f"{error} ({error.phase})",)
    return error


def raised(error: BaseException, run: Run, op: Op) -> SyncError:
    """Return the error of an operation as a `SyncError` that names tensor and phase."""
    if isinstance(error, SyncError):
        if error.tensor is None:
            _locate(error, run, op)
        return error
    blame = "" if op.peer is None else f" of rank {op.peer}"
    wrapped = SyncError(
        f"{type(error).__name__} in {op.phase}{blame} (tensor {run.name}, round {run.round}): {error}",
        rank=op.peer,
        tensor=run.name,
        phase=op.phase,
    )
    wrapped.__cause__ = error
    return wrapped


def _locate(error: SyncError, run: Run, op: Op) -> None:
    error.tensor, error.phase = run.name, op.phase
    error.args = (f"{error} (tensor {run.name}, {op.phase}, round {run.round})",)
