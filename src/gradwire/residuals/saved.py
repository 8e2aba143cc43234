"""The saved form of a residual state: written, and read with checks of its form, types and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gradwire.core.errors import UnknownNameError
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.residuals.slices import ROLES, STORED, ResidualSlice, Slices, overlap

STATE_VERSION = 2
LOAD = "Load the result of state_dict() of this version."


def written(slices: Slices) -> dict[str, Any]:
    """Return copies of what is committed; see `Residuals.state_dict`."""
    state: dict[str, Any] = {"version": STATE_VERSION}
    for role in STORED:
        by_name = {
            name: {
                str(elements.offset): torch.from_numpy(each.committed.copy())
                for elements, each in sorted(ranges.items())
                if each.committed is not None and elements.count
            }
            for (name, found), ranges in slices.items()
            if found == role and any(each.committed is not None for each in ranges.values())
        }
        if by_name or role in ROLES:
            state[role] = by_name
    return state


def read(state: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> tuple[Slices, Mapping[str, Any]]:
    """Check a whole state, and return its slices and the states of its compressors.

    Raises:
        ValueError, UnknownNameError, TypeError: See `Residuals.load_state_dict`.
    """
    if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION:
        found = f"version {state.get('version')!r}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise ValueError(f"A residual state must be a dict of version {STATE_VERSION}, but this is {found}. {LOAD}")
    fields = ("version", "states", *STORED)
    for field in state:
        if field not in fields:
            raise UnknownNameError("field of the residual state", field, fields)
    slices: Slices = {}
    for role in STORED:
        for name, ranges in _by_parameter(role, state.get(role, {}), specs):
            of_name = slices.setdefault((name, role), {})
            for offset, values in ranges.items():
                elements = ElementRange(_offset_of(name, offset), _size_of(name, values))
                _check_range(name, elements, specs[name].numel, of_name)
                of_name[elements] = ResidualSlice(values.detach().cpu().numpy().copy())
    return slices, dict(_by_parameter("states", state.get("states", {}), specs))


def _by_parameter(
    field: str, found: object, specs: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, ranges in mapping_of(field, found).items():
        if name not in specs:
            raise UnknownNameError("parameter in the residual state", name, specs)
        yield name, mapping_of(name, ranges)


def _check_range(name: str, elements: ElementRange, numel: int, others: Iterable[ElementRange]) -> None:
    if elements.offset < 0 or elements.end > numel:
        raise ValueError(
            f"{name} has {numel} elements, but the state has a residual for its elements {elements.offset} to "
            f"{elements.end}. Load the state of a model with the same shapes."
        )
    if any(overlap(elements, other) for other in others):
        raise ValueError(
            f"The state has two residuals for element {elements.offset} of {name}. Load the state of one rank, "
            "then those of others with merge=True."
        )


def mapping_of(what: str, found: object) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise TypeError(f"{what!r} in the residual state must be a dict, but is a {type(found).__name__}. {LOAD}")
    return found


def _offset_of(name: str, found: object) -> int:
    if not str(found).isdecimal():
        raise ValueError(f"The residuals of {name} must have element offsets as keys, but one is {found!r}. {LOAD}")
    return int(str(found))


def _size_of(name: str, values: object) -> int:
    """Check a tensor of a state, and return its number of elements."""
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"A residual of {name} must be a tensor, but is a {type(values).__name__}. {LOAD}")
    if values.dtype != torch.float32 or values.ndim != 1:
        raise TypeError(
            f"A residual of {name} must be a 1-D float32 tensor, but is {values.dtype} of shape "
            f"{tuple(values.shape)}. {LOAD}"
        )
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"The residual of {name} is not finite. Load an earlier checkpoint.")
    return values.numel()


def state_of(name: str, key: object, values: object) -> tuple[tuple[str, ElementRange], np.ndarray]:
    """Check a saved compressor state, and return its key and array."""
    offset, _, count = str(key).partition(":")
    if not (offset.isdecimal() and count.isdecimal()):
        raise ValueError(f"A compressor state of {name} must have an element range as key, not {key!r}. {LOAD}")
    if not isinstance(values, torch.Tensor) or values.ndim != 1 or values.dtype not in (torch.float32, torch.uint8):
        raise TypeError(f"The compressor state of {name} must be a 1-D tensor of float32 or uint8. {LOAD}")
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"The compressor state of {name} is not finite. Load an earlier checkpoint.")
    return (name, ElementRange(int(offset), int(count))), values.detach().cpu().numpy().copy()
