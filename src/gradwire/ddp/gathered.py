"""The states of all ranks in one document, for checkpoints that are one file per job.

A document is ``{"version": 1, "states": [state of rank 0, state of rank 1, ...]}``: plain dicts of tensors and numbers.
It loads with ``torch.load(..., weights_only=True)``, and `Handle.load_state_dict` takes it at any world size.

Guarantees: What ranks send each other is not unpickled without ``weights_only``. Memory, in excess of the document on
the ranks that return it: two copies of a rank's own state, and 16 MiB.
"""

# Shapes: W = ranks

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.core import host
from gradwire.core.errors import NO_TENSOR, OptionError, SyncError

GATHERED_VERSION = 1
_PIECE_BYTES = 16 * 2**20  # of all ranks, which one of them receives
_LEAST_PIECE_BYTES = 2**16

Document = dict[str, Any]


def gather_states(
    state: Mapping[str, Any], group: dist.ProcessGroup, timeout: timedelta, *, rank0_only: bool = False
) -> Document:
    """Gather the states of all ranks. Call it on every rank of the group.

    Args:
        state: State of this rank.
        group: Process group. Its own collectives carry the states.
        timeout: Limit of each collective, which moves 16 MiB at most (64 KiB of each of more than 256 ranks).
        rank0_only: Whether only rank 0 of the group needs the document. Other ranks return an empty dict.

    Raises:
        SyncError: A rank did not take part in time, or is gone.
    """
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    mine = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    try:
        gathered = _gather(mine, group, timeout, rank0_only)
    except RuntimeError as error:
        raise SyncError(
            f"The states of all ranks could not be gathered: {error} Call it on every rank, between steps.",
            tensor=NO_TENSOR,
            phase="gather state",
        ) from error
    if not gathered:
        return {}
    states = [torch.load(io.BytesIO(each.numpy().tobytes()), weights_only=True) for each in gathered]
    return {"version": GATHERED_VERSION, "states": states}


def _gather(mine: torch.Tensor, group: dist.ProcessGroup, timeout: timedelta, rank0_only: bool) -> list[torch.Tensor]:
    """Gather uint8 tensors of any size. Returns none on ranks that need none."""
    device, world_size = device_of(group), group.size()

    def finish(work: dist.Work | None) -> None:
        assert work is not None, "this rank is part of the group"
        work.wait(timeout)

    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    finish(dist.all_gather(sizes, host.tensor([mine.numel()], torch.int64).to(device), group=group, async_op=True))
    counts = [int(size) for size in sizes]
    takes = group.rank() == 0 or not rank0_only
    found = [host.empty(count, torch.uint8) for count in counts] if takes else []
    length = max(_PIECE_BYTES // world_size, _LEAST_PIECE_BYTES)
    for start in range(0, max(counts), length):
        size = min(length, max(counts) - start)
        piece = host.zeros(size, torch.uint8)
        own = mine[start : start + size]
        piece[: own.numel()] = own
        pieces = [torch.empty(size, dtype=torch.uint8, device=device) for _ in counts] if takes else None
        if rank0_only:
            finish(
                dist.gather(piece.to(device), pieces, dst=dist.get_global_rank(group, 0), group=group, async_op=True)
            )
        else:
            finish(dist.all_gather(pieces or [], piece.to(device), group=group, async_op=True))
        for whole, part in zip(found, pieces or ()):
            whole[start : start + size] = part[: max(0, whole.numel() - start)].cpu()
    return found


def device_of(group: dist.ProcessGroup) -> str:
    """The device of the tensors that a group's collectives take. A group for NCCL takes none of the CPU."""
    return "cpu" if "cpu" in dist.distributed_c10d.get_backend_config(group) else "cuda"


def states_of(
    state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
    """Return the states in a document of all ranks. Other states are returned as they are.

    Raises:
        OptionError: The document is of another version.
    """
    if not isinstance(state, Mapping) or "states" not in state:
        return state
    if state.get("version") != GATHERED_VERSION:
        raise OptionError(
            f"The gathered state has version {state.get('version')!r}, but this gradwire reads {GATHERED_VERSION}. "
            "Load it with the version that saved it."
        )
    states: Sequence[Mapping[str, Any]] = state["states"]
    return states


class GatheredStateful:
    """`Stateful` of torch.distributed.checkpoint: the document of all ranks, as one entry of bytes.

    A rank's own state does not fit there. Entries with one name on all ranks count as replicas, of which one is saved,
    and a new job does not know the names of another world size.

    Args:
        gather: Returns the document, on every rank.
        load: Loads it.
    """

    def __init__(self, gather: Callable[[], Document], load: Callable[[Document], None]) -> None:
        self._gather, self._load = gather, load

    def state_dict(self) -> dict[str, Any]:
        """Gather the document. The checkpoint calls it on every rank, to save and also to load."""
        buffer = io.BytesIO()
        torch.save(self._gather(), buffer)
        return {"gathered": buffer.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what the checkpoint holds."""
        self._load(torch.load(io.BytesIO(state_dict["gathered"]), weights_only=True))
