"""Another number of ranks: the residuals of all old ranks, handed on to the new ones without loss.

The rule. New rank j goes on with what old rank j held, in both roles. What an old rank without a successor held, as
a worker (role ``local``) or as an owner of ranges (role ``aggregate``), is cut evenly by elements and added to the
local residuals of all new ranks. A rank without a predecessor begins with none. Where owners of ranges change, their
residuals need no move: a rank that now encodes a range in the other role takes over what it holds of it. Velocities of
momentum correction are handed on in the same way, among themselves.

The divisor. Residuals are in units of the mean: what they hold is still to be applied to the parameters, as it is.
So nothing is rescaled, and the sum over ranks and roles, element by element, is the same before and after; gradients
that are produced afterwards are divided by the new number of ranks.

States of compressors that all old ranks hold alike stay, and others are dropped.
"""

# Shapes: V = ranks before, W = ranks after.

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.core.errors import OptionError
from gradwire.core.spec import ElementRange, TensorSpec, as_array
from gradwire.residuals.states import common_states
from gradwire.residuals.transaction import STORED, ResidualKey, Residuals, Role
from gradwire.sync.job import split

_LOAD = "Do: pass what state_dict() gave on every rank at one step, in the order of the ranks."


def resize_state(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Turn the states of all ranks of one job into those of a job of `world_size` ranks.

    A function of its arguments alone, so each rank may call it for itself and take its own entry, or one process may
    do it for all. See the module for the rule.

    Args:
        states: what `state_dict` gave on each of V ranks, in the order of the ranks. Another order decides who stays:
            the first `world_size` do.
        world_size: ranks of the new job, at least 1.

    Returns:
        The new states by rank. They share no memory with `states`.

    Raises:
        OptionError: not all ranks are there, or they are not of one step of one job.
        ValueError, TypeError: something that is no residual state.
    """
    _check(states, world_size)
    held = [Residuals() for _ in range(max(len(states), world_size))]
    common = common_states(state["residuals"].get("states", {}) for state in states)
    for rank, residuals in enumerate(held):
        own = states[rank]["residuals"] if rank < len(states) else {"version": states[0]["residuals"].get("version")}
        residuals.load_state_dict({**own, "states": common}, _AnySpec())
    for state in states[world_size:]:
        _hand_on(state["residuals"], held[:world_size])
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
    """Specs of any parameter: a range is held against its parameter's size where the state is loaded, not here."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> TensorSpec:
        return TensorSpec((sys.maxsize,))


def _hand_on(left: Mapping[str, Any], heirs: Sequence[Residuals]) -> None:
    """Cut what a rank has left behind among `heirs`, range by range."""
    for role in STORED:
        kept: Role = "velocity" if role == "velocity" else "local"
        for name, pieces in left.get(role, {}).items():
            for offset, tensor in pieces.items():
                values = as_array(tensor)
                for heir, part in zip(heirs, split(values.size, len(heirs), alignment=1)):
                    if part.count:
                        where = ElementRange(int(offset) + part.offset, part.count)
                        heir.add(ResidualKey(name, where, kept), values[part.slice])


def _check(states: Sequence[Mapping[str, Any]], world_size: int) -> None:
    if world_size < 1:
        raise OptionError(f"Expected a world size of at least 1, got {world_size}. Do: pass the new number of ranks.")
    ranks = sorted(state.get("rank", -1) for state in states)
    if not states or ranks != list(range(len(states))):
        raise OptionError(f"Expected the states of ranks 0 to {max(len(states) - 1, 0)}, got those of {ranks}. {_LOAD}")
    for key in ("world_size", "version", "step", "seed"):
        found = sorted({state.get(key, "none") for state in states}, key=str)
        expected = [len(states)] if key == "world_size" else found[:1]
        if found != expected:
            raise OptionError(f"Expected states of one {key}, {expected[0]}, got {found}. {_LOAD}")
