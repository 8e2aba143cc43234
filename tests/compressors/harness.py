"""Shared helpers for tests of single algorithms."""

from __future__ import annotations

import math

import numpy as np
import torch

import gradwire.compressors as compressors
from gradwire.compressors import Compressor
from gradwire.compressors.base.traced import TracedCompressor
from gradwire.kernels.reference import positions_bytes
from tests.contracts.compressor_cases import context


def traced(name: str, **options) -> TracedCompressor:
    codec = compressors.make(name, **options)
    assert isinstance(codec, TracedCompressor)
    return codec


def sent(codec: Compressor, grad: torch.Tensor, **fields) -> np.ndarray:
    """Return decode(encode(gradient))."""
    ctx = context(grad, **fields)
    return codec.decode(codec.encode(grad, ctx), ctx).numpy()


def body(codec: Compressor, grad: torch.Tensor) -> np.ndarray:
    return codec.encode(grad, context(grad)).body


def draws(codec: Compressor, grad: torch.Tensor, count: int) -> np.ndarray:
    """Return decode(encode(gradient)) in `count` steps, float64[count, N]."""
    return np.stack([sent(codec, grad, step=step) for step in range(count)]).astype(np.float64)


def list_bytes(size: int, count: int) -> int:
    """Size of a list of `count` of `size` elements: its length, float32 values, positions."""
    return 4 + 4 * count + positions_bytes(size, count)


def hoeffding(width: float, count: int, alarm: float = 1e-6) -> float:
    """Bound on the deviation of the mean of `count` draws from a range of this width."""
    return width * math.sqrt(math.log(2 / alarm) / (2 * count))
