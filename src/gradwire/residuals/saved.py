"""Checks of a residual state that comes from a file: its form, types and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gradwire.core.spec import ElementRange

LOAD = "Load the result of state_dict() of this version."


def mapping_of(what: str, found: object) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise TypeError(f"{what!r} in the residual state must be a dict, but is a {type(found).__name__}. {LOAD}")
    return found


def offset_of(name: str, found: object) -> int:
    if not str(found).isdecimal():
        raise ValueError(f"The residuals of {name} must have element offsets as keys, but one is {found!r}. {LOAD}")
    return int(str(found))


def size_of(name: str, values: object) -> int:
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
