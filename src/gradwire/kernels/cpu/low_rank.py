"""Products of a matrix with thin factors, and what becomes of factors. Contracts: `reference.low_rank`."""
# Shapes: x[n, m], left[r, n], right[r, m], rows[r, n]

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import LANES
from gradwire.kernels.cpu.lanes import splat, sum_lanes
from gradwire.kernels.cpu.vector import load, store
from gradwire.kernels.layout import expect_size
from gradwire.kernels.reference.low_rank import DEPENDENT, NUM_LANES

_COLUMNS = 2048  # at a time, so that sums and factors stay in the cache


@kernel
def _row_products(x, right, left):
    rank, columns = right.shape
    for i in range(x.shape[0]):
        for k in range(rank):
            lanes = splat(np.float32(0), NUM_LANES)
            for j in range(0, columns, NUM_LANES):
                lanes = lanes + load(x[i], j, NUM_LANES) * load(right[k], j, NUM_LANES)
            left[k, i] = sum_lanes(lanes)


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
    for start in range(0, columns, _COLUMNS):
        for i in range(out.shape[0]):
            row = out[i]
            for j in range(start, min(start + _COLUMNS, columns), LANES):
                total = splat(np.float32(0), LANES)
                for k in range(rank):
                    total = total + load(right[k], j, LANES) * left[k, i]
                if scale != 0:
                    total = load(row, j, LANES) + total * scale
                store(row, j, total)


def outer_sum(left: np.ndarray, right: np.ndarray, rank: int, scale: float, out: np.ndarray) -> None:
    columns, rows = right.size // rank, left.size // rank
    expect_size("outer_sum", "out", out, rows * columns)
    factors = left.reshape(rank, rows), right.reshape(rank, columns)
    _outer_sum(*factors, np.float32(scale), out.reshape(rows, columns))


@kernel
def _dot(left, right):
    total = np.float64(left[0]) * np.float64(right[0])
    for j in range(1, left.size):
        total += np.float64(left[j]) * np.float64(right[j])
    return total


@kernel
def _subtract(row, factor, other):
    for j in range(row.size):
        row[j] -= factor * other[j]


@kernel
def _orthonormalize(rows):
    rank = rows.shape[0]
    before = np.empty(rank)
    for k in range(rank):
        before[k] = np.sqrt(_dot(rows[k], rows[k]))
    for k in range(rank):
        row = rows[k]
        for earlier in range(k):
            _subtract(row, _dot(row, rows[earlier]), rows[earlier])
        left = np.sqrt(_dot(row, row))
        is_independent = left > DEPENDENT * before[k]
        for j in range(row.size):
            row[j] = row[j] / left if is_independent else 0.0
        for later in range(k + 1, rank):
            _subtract(rows[later], _dot(rows[later], row), row)


def orthonormalize(rows: np.ndarray, rank: int) -> None:
    _orthonormalize(rows.reshape(rank, -1))


@kernel
def _normalize_rows(rows, scale, out):
    num_zeros = 0
    for k in range(rows.shape[0]):
        row, unit = rows[k], out[k]
        for j in range(row.size):
            unit[j] = row[j] if np.isfinite(row[j]) else np.float32(0)
        length = np.sqrt(_dot(unit, unit))
        if length == 0:
            num_zeros += 1
            continue
        for j in range(row.size):
            unit[j] = np.float32(np.float64(unit[j]) / length) * scale
    return num_zeros


def normalize_rows(rows: np.ndarray, rank: int, scale: float, out: np.ndarray) -> int:
    expect_size("normalize_rows", "out", out, rows.size)
    return int(_normalize_rows(rows.reshape(rank, -1), np.float32(scale), out.reshape(rank, -1)))
