"""Shape, element type, and ranges of elements of a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.core.element_codes import ELEMENT_CODES
from gradwire.core.errors import UnknownNameError

ELEMENT_TYPES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in ELEMENT_CODES.items()}
"""Element types of a gradient, and their codes on the wire."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and element type of a tensor, known to a receiver before any byte arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_TYPES:
            raise UnknownNameError("element type", str(self.dtype), map(str, ELEMENT_TYPES))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, order=True)
class ElementRange:
    """Elements [offset, offset + count) of a flattened tensor."""

    offset: int
    count: int

    @property
    def end(self) -> int:
        return self.offset + self.count


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the elements of a CPU tensor as a contiguous 1-D NumPy array, without a copy if possible.

    NumPy has no bfloat16: kernels take such tensors as a uint16 view of their bits, which this returns.
    """
    flat = tensor.detach().reshape(-1)
    if not flat.is_contiguous():
        flat = flat.contiguous()
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    return flat.numpy()


def as_tensor(array: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor that shares the memory of `array`: the inverse of `as_array`."""
    if spec.dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).reshape(spec.shape)
    return torch.from_numpy(array).reshape(spec.shape)
