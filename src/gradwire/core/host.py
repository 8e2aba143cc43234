"""Tensors on the host, whatever torch's defaults are (`torch.set_default_dtype`, `torch.set_default_device`).

All code between ranks makes its tensors here, or names element type and device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def empty(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor with arbitrary contents."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def zeros(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of zeros."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


def ones(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of ones."""
    return torch.ones(shape, dtype=dtype, device="cpu")


def tensor(values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of numbers, such as a list of them or a single one."""
    return torch.tensor(values, dtype=dtype, device="cpu")


def ramp(count: int) -> torch.Tensor:
    """Return float32 numbers from -1 to 1."""
    return torch.linspace(-1, 1, count, dtype=torch.float32, device="cpu")
