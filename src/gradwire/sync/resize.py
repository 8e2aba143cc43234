"""Resuming a job with another number of ranks, without losing residuals.

New rank j takes over the residuals of old rank j, in both roles. Residuals of old ranks without a successor are split
evenly by elements and added to the local residuals of all new ranks, whatever their role was. New ranks without a
predecessor start without residuals. If the owner of a range changes, nothing needs to move: a rank that encodes a range
in the other role takes over its own residual of that range. Velocities of momentum correction follow the same rule,
among themselves.

Residuals are in units of the mean, so they are not rescaled. The sum over ranks and roles stays the same for each
element. Later gradients are divided by the new number of ranks.

States of compressors that are equal on all old ranks are kept. Others are dropped, unless the number of ranks and their
order are the same: then each rank keeps its own, and resumes bit for bit.
"""

# Shapes: V = ranks before, W = ranks after.

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.core.errors import OptionError
from gradwire.core.spec import ElementRange, TensorSpec, as_array
from gradwire.residuals.slices import STORED, ResidualKey, Role
from gradwire.residuals.states import common_states
from gradwire.residuals.transaction import Residuals
from gradwire.sync.chunk import split

_LOAD = "Pass the state_dict() of every rank at one step, in the order of the ranks."


def resize_state(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Convert the states of all ranks of a job to the states of a job of another size.

    New rank j takes over the residuals of old rank j. Those of ranks without a successor are split among all new ranks.
    The result depends only on the arguments: each rank may call this function and take its own entry, or one process
    may call it for all.

    Args:
        states: `state_dict()` of each of V ranks, normally in the order of the ranks. The first `world_size` states get
            a successor.
        world_size: Number of ranks of the new job, at least 1.

    Returns:
        The new states by rank. They share no memory with `states`.

    Raises:
        OptionError: States of some ranks are missing, or they are not from one step of one job.
        ValueError, TypeError: Not a residual state.
    """
    _check(states, world_size)
    held = [Residuals() for _ in range(max(len(states), world_size))]
    common = common_states(state["residuals"].get("states", {}) for state in states)
    same = [state["rank"] for state in states] == list(range(world_size))
    for rank, residuals in enumerate(held):
        own = states[rank]["residuals"] if rank < len(states) else {"version": states[0]["residuals"].get("version")}
        residuals.load_state_dict(own if same else {**own, "states": common}, _AnySpec())
    for state in states[world_size:]:
        _distribute(state["residuals"], held[:world_size])
    return [
        {
            **(states[rank] if rank < len(states) else states[0]),
            "rank": rank,
            "world_size": world_size,
            "residuals": held[rank].state_dict(),
        }
        for rank in range(world_size)
    ]


class _AnySpec(dict[str, TensorSpec]):
    """Specs that accept any parameter: ranges are checked when the new state is loaded, not here."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> TensorSpec:
        return TensorSpec((sys.maxsize,))


def _distribute(state: Mapping[str, Any], targets: Sequence[Residuals]) -> None:
    """Split the residuals of a rank without a successor among `targets`, range by range."""
    for role in STORED:
        new_role: Role = "velocity" if role == "velocity" else "local"
        for name, slices in state.get(role, {}).items():
            for offset, tensor in slices.items():
                values = as_array(tensor)
                for target, chunk in zip(targets, split(values.size, len(targets), alignment=1)):
                    if chunk.count:
                        elements = ElementRange(int(offset) + chunk.offset, chunk.count)
                        target.add(ResidualKey(name, elements, new_role), values[chunk.slice])


def _check(states: Sequence[Mapping[str, Any]], world_size: int) -> None:
    if world_size < 1:
        raise OptionError(f"A job cannot have {world_size} ranks. Pass the new number of ranks.")
    ranks = sorted(state.get("rank", -1) for state in states)
    if not states or ranks != list(range(len(states))):
        raise OptionError(
            f"Resizing needs the state of every rank once. These are the states of ranks {ranks}. {_LOAD}"
        )
    for key in ("world_size", "version", "step", "seed"):
        found = sorted({state.get(key, "none") for state in states}, key=str)
        expected = [len(states)] if key == "world_size" else found[:1]
        if found != expected:
            raise OptionError(f"The states should all have {key} {expected[0]}, but they have {found}. {_LOAD}")
