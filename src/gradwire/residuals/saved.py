"""Checks of a residual state that comes from a file: form, types, values; each raises with what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gradwire.core.spec import ElementRange

LOAD = "Do: load what state_dict() gave."


def mapping_of(what: str, found: object) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise TypeError(f"Expected a dict of residuals for {what}, got {type(found).__name__}. {LOAD}")
    return found


def offset_of(name: str, found: object) -> int:
    if not str(found).isdecimal():
        raise ValueError(f"Expected an element offset as key of a residual of {name}, got {found!r}. {LOAD}")
    return int(str(found))


def size_of(name: str, values: object) -> int:
    """Number of elements of a tensor from a state, after a look at its type, shape and values."""
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"Expected a tensor as residual of {name}, got {type(values).__name__}. {LOAD}")
    if values.dtype != torch.float32 or values.ndim != 1:
        raise TypeError(
            f"Expected a 1-D float32 tensor as residual of {name}, got {values.dtype} of shape "
            f"{tuple(values.shape)}. {LOAD}"
        )
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"Expected finite residuals, got NaN or infinity (in {name}). Do: load an earlier checkpoint.")
    return values.numel()


def state_of(name: str, key: object, values: object) -> tuple[tuple[str, ElementRange], np.ndarray]:
    """Key and array of a saved compressor state."""
    offset, _, count = str(key).partition(":")
    if not (offset.isdecimal() and count.isdecimal()):
        raise ValueError(f"{key!r} is no element range of a compressor state (in {name}). {LOAD}")
    if not isinstance(values, torch.Tensor) or values.ndim != 1 or values.dtype not in (torch.float32, torch.uint8):
        raise TypeError(f"The compressor state of {name} must be a 1-D tensor of float32 or uint8. {LOAD}")
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"The compressor state of {name} is not finite. Load an earlier checkpoint.")
    return (name, ElementRange(int(offset), int(count))), values.detach().cpu().numpy().copy()
