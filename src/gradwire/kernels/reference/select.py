"""Selection of elements by magnitude, and conversion between sparse (index, value) pairs and dense tensors.

Top-k compares magnitudes as integers, the bits without the sign. Infinity is above all finite values and NaN above
infinity, so the result is deterministic for any input.
"""
# Shapes: N elements, K kept elements, W ranks

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.kernels.layout import expect_same_ranks, expect_size
from gradwire.kernels.reference.elements import as_float32


def top_k(x: np.ndarray, k: int, indices: np.ndarray) -> None:
    """Write the indices, ascending, of the k elements of largest magnitude; ties go to the lowest index.

    Args:
        x: Gradient.
        k: Number of elements, 0 to N.
        indices: uint32[k] or int64[k].
    """
    if not 0 <= k <= x.size:
        raise ValueError(f"Expected k from 0 to {x.size}, got {k} (in top_k).")
    expect_size("top_k", "indices", indices, k)
    keys = as_float32(x).view(np.int32) & np.int32(0x7FFFFFFF)
    indices[:] = np.sort(np.argsort(-keys, kind="stable")[:k])


def take(x: np.ndarray, indices: np.ndarray, values: np.ndarray, residual: np.ndarray | None = None) -> None:
    """Write x[indices] to `values`, float32, and set `residual` to zero there; it may be the same array as x.

    The indices must come from a selection or have passed `check_indices`.
    """
    expect_size("take", "values", values, indices.size)
    values[:] = as_float32(x[indices])
    if residual is not None:
        expect_size("take", "residual", residual, x.size)
        residual[indices] = 0


def scatter(indices: np.ndarray, values: np.ndarray, out: np.ndarray, accumulate: bool = False) -> None:
    """Write (or add) values to out[indices]; other elements keep their values.

    The indices must have passed `check_indices`.
    """
    expect_size("scatter", "values", values, indices.size)
    with np.errstate(all="ignore"):
        out[indices] = out[indices] + values if accumulate else values


def scatter_sum(indices: Sequence[np.ndarray], values: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Write the dense sum of the pairs of all ranks, added to 0.0 in rank order."""
    expect_same_ranks("scatter_sum", indices, values)
    out[:] = 0
    for where, what in zip(indices, values, strict=True):
        scatter(where, what, out, accumulate=True)


def check_indices(indices: np.ndarray, n: int) -> bool:
    """Whether the indices are strictly ascending, not negative and below n."""
    if indices.size == 0:
        return True
    ascending = bool((indices[1:] > indices[:-1]).all())
    return ascending and int(indices[0]) >= 0 and int(indices[-1]) < n
