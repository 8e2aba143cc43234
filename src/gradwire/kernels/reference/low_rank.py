"""Products of a matrix with thin factors: inner loops of a power iteration.

The order of additions is fixed, so that every backend and machine computes the same bits: `row_products` adds 64
running sums and then these in order; `column_products` and `outer_sum` add in order.

All arrays are float32, flat and not empty. A matrix is stored row by row, a factor rank by rank.
"""
# Shapes: x[n, m], left[r, n], right[r, m]

from __future__ import annotations

import numpy as np

from gradwire.kernels.layout import expect_size

NUM_LANES = 64


def row_products(x: np.ndarray, right: np.ndarray, rank: int, left: np.ndarray) -> None:
    """Write left[k, i] = sum over j of x[i, j] right[k, j]."""
    columns, rows = right.size // rank, left.size // rank
    expect_size("row_products", "x", x, rows * columns)
    matrix, factors = x.reshape(rows, 1, columns), right.reshape(rank, columns)
    lanes = np.zeros((rows, rank, NUM_LANES), np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, columns, NUM_LANES):
            products = matrix[:, :, start : start + NUM_LANES] * factors[:, start : start + NUM_LANES]
            lanes[:, :, : products.shape[2]] += products
        left[:] = np.cumsum(lanes, axis=2)[:, :, -1].T.reshape(-1)


def column_products(x: np.ndarray, left: np.ndarray, rank: int, right: np.ndarray) -> None:
    """Write right[k, j] = sum over i of left[k, i] x[i, j]."""
    columns, rows = right.size // rank, left.size // rank
    expect_size("column_products", "x", x, rows * columns)
    sums, factors = right.reshape(rank, columns), left.reshape(rank, rows)
    sums.fill(0)
    with np.errstate(all="ignore"):
        for i, row in enumerate(x.reshape(rows, columns)):
            sums += factors[:, i, None] * row


def outer_sum(left: np.ndarray, right: np.ndarray, rank: int, scale: float, out: np.ndarray) -> None:
    """Add scale · s to out[i, j], where s = sum over k of left[k, i] right[k, j].

    Args:
        left, right: Factors, float32[r n] and float32[r m].
        rank: r.
        scale: -1 or 1; 0 overwrites `out` with s.
        out: float32[n m].
    """
    columns, rows = right.size // rank, left.size // rank
    expect_size("outer_sum", "out", out, rows * columns)
    with np.errstate(all="ignore"):
        total = np.zeros((rows, columns), np.float32)
        for column, row in zip(left.reshape(rank, rows), right.reshape(rank, columns), strict=True):
            total += column[:, None] * row
        matrix = out.reshape(rows, columns)
        matrix[:] = total if scale == 0 else matrix + np.float32(scale) * total
