"""Products of a matrix with thin factors, and what becomes of factors: inner loops of a power iteration.

The order of additions is fixed, so that every backend and machine computes the same bits: `row_products` adds 64
running sums, and then these by halving; all others add in order.

All arrays are float32 unless a kernel says otherwise, flat and not empty. A matrix is stored row by row, a factor rank
by rank.
"""
# Shapes: x[n, m], left[r, n], right[r, m]

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.layout import expect_size

NUM_LANES = 64
DEPENDENT = 1e-6  # of the length of a row: after projection, less than this is rounding error


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
        while lanes.shape[2] > 1:
            half = lanes.shape[2] // 2
            lanes = lanes[:, :, :half] + lanes[:, :, half:]
        left[:] = lanes[:, :, 0].T.reshape(-1)


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


def orthonormalize(rows: np.ndarray, rank: int) -> None:
    """Make rows orthonormal, by repeated Gram-Schmidt. Rows that depend on earlier ones become zero.

    Args:
        rows: float64[r n], overwritten with orthonormal rows of the same span.
        rank: r.
    """
    basis = rows.reshape(rank, -1)
    with np.errstate(all="ignore"):
        before = _lengths(basis)
        for index, row in enumerate(basis):  # without its share of earlier rows already
            for earlier in basis[:index]:
                row -= _dots(row, earlier) * earlier  # once more, against rounding errors
            left = np.sqrt(_dots(row, row))
            if left > DEPENDENT * before[index]:
                row /= left
            else:
                row.fill(0)
            later = basis[index + 1 :]
            later -= _dots(later, row)[:, None] * row


def normalize_rows(rows: np.ndarray, rank: int, scale: float, out: np.ndarray) -> int:
    """Write scale · row / length for each row, in which elements that are not finite count as zeros.

    Args:
        rows: float32[r n].
        rank: r.
        scale: Factor, applied after the quotient is rounded to float32.
        out: float32[r n]. Rows of zeros stay zeros.

    Returns:
        Number of rows of zeros.
    """
    expect_size("normalize_rows", "out", out, rows.size)
    finite = np.where(np.isfinite(rows), rows, 0).astype(np.float64).reshape(rank, -1)
    lengths = _lengths(finite)
    unit = (finite / np.where(lengths > 0, lengths, 1)[:, None]).astype(np.float32)
    out[:] = (unit * np.float32(scale)).reshape(-1)
    return int(np.count_nonzero(lengths == 0))


def _lengths(rows: np.ndarray) -> np.ndarray:
    lengths: np.ndarray = np.sqrt(_dots(rows, rows))
    return lengths


def _dots(left: np.ndarray, right: np.ndarray) -> Any:
    """Dot products of each row: `np.dot` and `np.sum` are free to add in any order."""
    return np.add.accumulate(left * right, axis=-1)[..., -1]
