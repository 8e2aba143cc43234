"""The matrices of a fusion group, which PowerSGD encodes and decodes in one call. The bits are those of one by one.

A table has one row for each matrix, with the columns below. Factors lie one after another in the order of the table:
those of the shorter sides in one array, those of the longer sides in another. Addresses are those of contiguous float32
arrays. Before anything is written over a gradient or a residual, all factors are known to be finite and small
enough; otherwise the result is False, and the caller encodes or decodes the matrices one by one.
"""
# Shapes: M = matrices, r = rank; of one matrix: n rows, m columns, A and B its shorter and longer side

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.low_rank import _column_products, _normalize_rows, _orthonormalize, _outer_sum, _row_products
from gradwire.kernels.cpu.sweep import compensate_bits
from gradwire.kernels.cpu.vector import array_at, f32

ROWS, COLUMNS, SHORT_AT, LONG_AT = range(4)
"""Columns of a table, int64[M, 4]: n, m, and where the factors of a matrix begin."""


@kernel
def _short(row, rank, factors):
    side = min(row[ROWS], row[COLUMNS])
    return factors[row[SHORT_AT] : row[SHORT_AT] + rank * side].reshape(rank, side)


@kernel
def _long(row, rank, factors):
    side = max(row[ROWS], row[COLUMNS])
    return factors[row[LONG_AT] : row[LONG_AT] + rank * side].reshape(rank, side)


@kernel
def _matrix_at(address, row):
    return array_at(address, row[ROWS] * row[COLUMNS], f32).reshape(row[ROWS], row[COLUMNS])


@kernel
def _largest(factor):
    """Largest magnitude, in float64; infinity if an element is not finite."""
    largest = np.float32(0)
    for k in range(factor.shape[0]):
        for j in range(factor.shape[1]):
            magnitude = abs(factor[k, j])
            if not magnitude < np.inf:
                return np.inf
            largest = max(largest, magnitude)
    return np.float64(largest)


@kernel
def _outer(row, p, q, scale, out):
    if row[ROWS] <= row[COLUMNS]:
        _outer_sum(p, q, scale, out)
    else:
        _outer_sum(q, p, scale, out)


@kernel
def normalize(table, rank, states, lengths, units, is_drawn):
    """Rows of unit length times `lengths`, float32[M]; `is_drawn` receives which matrices have a row of zeros."""
    for i in range(table.shape[0]):
        rows, out = _long(table[i], rank, states), _long(table[i], rank, units)
        is_drawn[i] = _normalize_rows(rows, lengths[i], out) > 0


@kernel
def project(table, rank, grads, scale, residuals_in, residuals_out, units, out):
    """Compensated gradients at `residuals_out`, and their products with `units`; infinity where one is not finite."""
    for i in range(table.shape[0]):
        row = table[i]
        count = row[ROWS] * row[COLUMNS]
        compensated = array_at(residuals_out[i], count, f32)
        compensate_bits(array_at(grads[i], count, f32), scale, array_at(residuals_in[i], count, f32), compensated)
        x, p = _matrix_at(residuals_out[i], row), _short(row, rank, out)
        if row[ROWS] <= row[COLUMNS]:
            _row_products(x, _long(row, rank, units), p)
        else:
            _column_products(x, _long(row, rank, units), p)
        if _largest(p) == np.inf:
            p[:] = np.inf


@kernel
def orthonormalize(table, rank, sums, out):
    """Orthonormal rows of the same span, or the same values where one is not finite."""
    for i in range(table.shape[0]):
        rows, basis = _short(table[i], rank, sums), _short(table[i], rank, out)
        wide = rows.astype(np.float64)
        if _largest(rows) < np.inf:
            _orthonormalize(wide)
        basis[:] = wide.astype(np.float32)


@kernel
def encode(table, rank, compensated, bases, out, most):
    """Products of matrices with their bases, and what remains of the matrices, in place.

    Args:
        most: Largest bound of the elements of a product with which an addition to it is exact.
    """
    for i in range(table.shape[0]):
        row = table[i]
        x, p, q = _matrix_at(compensated[i], row), _short(row, rank, bases), _long(row, rank, out)
        if _largest(p) == np.inf:
            return False
        if row[ROWS] <= row[COLUMNS]:
            _column_products(x, p, q)
        else:
            _row_products(x, p, q)
        if not rank * _largest(p) * _largest(q) <= most:
            return False
    for i in range(table.shape[0]):
        row = table[i]
        p, q = _short(row, rank, bases), _long(row, rank, out)
        _outer(row, p, q, np.float32(-1), _matrix_at(compensated[i], row))
    return True


@kernel
def decode(table, rank, bases, factors, outs, most):
    """Write the products of bases and factors to tensors."""
    for i in range(table.shape[0]):
        p, q = _short(table[i], rank, bases), _long(table[i], rank, factors)
        if not rank * _largest(p) * _largest(q) <= most:
            return False
    for i in range(table.shape[0]):
        p, q = _short(table[i], rank, bases), _long(table[i], rank, factors)
        _outer(table[i], p, q, np.float32(0), _matrix_at(outs[i], table[i]))
    return True
