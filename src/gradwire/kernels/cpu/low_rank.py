"""Products of a matrix with thin factors. Contracts: `reference.low_rank`."""
# Shapes: x[n, m], left[r, n], right[r, m]

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.layout import expect_size
from gradwire.kernels.reference.low_rank import NUM_LANES

_COLUMNS = 2048  # at a time, so that sums stay in the cache


@kernel
def _row_products(x, right, left):
    rank, columns = right.shape
    whole = columns // NUM_LANES * NUM_LANES
    lanes = np.empty(NUM_LANES, np.float32)
    for i in range(x.shape[0]):
        row = x[i]
        for k in range(rank):
            factor = right[k]
            lanes[:] = 0
            for j in range(0, whole, NUM_LANES):
                values, weights = row[j : j + NUM_LANES], factor[j : j + NUM_LANES]
                for lane in range(NUM_LANES):
                    lanes[lane] += values[lane] * weights[lane]
            for j in range(whole, columns):
                lanes[j - whole] += row[j] * factor[j]
            total = lanes[0]
            for lane in range(1, NUM_LANES):
                total += lanes[lane]
            left[k, i] = total


def row_products(x: np.ndarray, right: np.ndarray, rank: int, left: np.ndarray) -> None:
    columns, rows = right.size // rank, left.size // rank
    expect_size("row_products", "x", x, rows * columns)
    _row_products(x.reshape(rows, columns), right.reshape(rank, columns), left.reshape(rank, rows))


@kernel
def _column_products(x, left, right):
    rank, columns = right.shape
    right[:] = 0
    for start in range(0, columns, _COLUMNS):
        end = min(start + _COLUMNS, columns)
        for i in range(x.shape[0]):
            row = x[i, start:end]
            for k in range(rank):
                factor, sums = left[k, i], right[k, start:end]
                for j in range(row.size):
                    sums[j] += factor * row[j]


def column_products(x: np.ndarray, left: np.ndarray, rank: int, right: np.ndarray) -> None:
    columns, rows = right.size // rank, left.size // rank
    expect_size("column_products", "x", x, rows * columns)
    _column_products(x.reshape(rows, columns), left.reshape(rank, rows), right.reshape(rank, columns))


@kernel
def _outer_sum(left, right, scale, out):
    rank, columns = right.shape
    total = np.empty(min(columns, _COLUMNS), np.float32)
    for start in range(0, columns, _COLUMNS):
        end = min(start + _COLUMNS, columns)
        for i in range(out.shape[0]):
            row = out[i, start:end]
            total[: row.size] = 0
            for k in range(rank):
                factor, weights = left[k, i], right[k, start:end]
                for j in range(row.size):
                    total[j] += factor * weights[j]
            if scale == 0:
                for j in range(row.size):
                    row[j] = total[j]
            else:
                for j in range(row.size):
                    row[j] += scale * total[j]


def outer_sum(left: np.ndarray, right: np.ndarray, rank: int, scale: float, out: np.ndarray) -> None:
    columns, rows = right.size // rank, left.size // rank
    expect_size("outer_sum", "out", out, rows * columns)
    factors = left.reshape(rank, rows), right.reshape(rank, columns)
    _outer_sum(*factors, np.float32(scale), out.reshape(rows, columns))
