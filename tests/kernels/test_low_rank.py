import numpy as np
import pytest

from gradwire.kernels import cpu, reference
from tests.kernels.samples import assert_backends_agree, gradients, random_normal

SHAPES = [(1, 1), (3, 64), (7, 200), (64, 63), (5, 4200), (300, 9)]


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_agree(rows, columns, rank):
    left, right = random_normal(rank * rows, seed=1), random_normal(rank * columns, seed=2)
    for x in gradients("float32", rows * columns):

        def call(kernels, x=x):
            by_rows, by_columns = np.empty_like(left), np.full_like(right, np.nan)
            kernels.row_products(x, right, rank, by_rows)
            kernels.column_products(x, left, rank, by_columns)
            found = [by_rows, by_columns]
            for scale in (0.0, 1.0, -1.0):
                found.append(x.copy())
                kernels.outer_sum(left, right, rank, scale, found[-1])
            return found

        assert_backends_agree(call)


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_they_are_matrix_products(kernels):
    rows, columns, rank = 40, 150, 3
    x, p, q = random_normal(rows * columns), random_normal(rank * rows, 1), random_normal(rank * columns, 2)
    matrix, left, right = x.reshape(rows, columns), p.reshape(rank, rows), q.reshape(rank, columns)
    out = np.empty(rank * rows, np.float32)
    kernels.row_products(x, q, rank, out)
    np.testing.assert_allclose(out.reshape(rank, rows), right @ matrix.T, rtol=1e-4, atol=1e-3)
    out = np.empty(rank * columns, np.float32)
    kernels.column_products(x, p, rank, out)
    np.testing.assert_allclose(out.reshape(rank, columns), left @ matrix, rtol=1e-4, atol=1e-3)
    kernels.outer_sum(p, q, rank, -1.0, x)
    np.testing.assert_allclose(matrix, random_normal(rows * columns).reshape(rows, -1) - left.T @ right, atol=1e-3)


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("length", [1, 9, 64, 1100])
def test_factors_agree(length, rank):
    for x in gradients("float32", rank * length):

        def call(kernels, x=x):
            basis, unit = np.nan_to_num(x.astype(np.float64)), np.empty_like(x)
            kernels.orthonormalize(basis, rank)
            num_zeros = kernels.normalize_rows(x, rank, 0.3, unit)
            return [basis, unit, np.array(num_zeros)]

        assert_backends_agree(call)


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_rows_have_the_length_that_was_asked_for_or_none(kernels):
    x, unit = random_normal(3 * 200), np.empty(600, np.float32)
    x[:200], x[200] = 0, np.inf
    assert kernels.normalize_rows(x, 3, 0.5, unit) == 1
    np.testing.assert_allclose(np.linalg.norm(unit.reshape(3, 200), axis=1), [0, 0.5, 0.5], rtol=1e-6)
    assert unit[200] == 0
    np.testing.assert_allclose(unit[400:] * np.linalg.norm(x[400:]), x[400:] / 2, rtol=1e-5)


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_a_basis_is_orthonormal_and_dependent_rows_are_dropped(kernels):
    rows = random_normal(5 * 300).astype(np.float64).reshape(5, 300)
    rows[3] = 2 * rows[0] - rows[1]
    basis = rows.copy()
    kernels.orthonormalize(basis.reshape(-1), 5)
    assert np.flatnonzero(basis.any(1)).tolist() == [0, 1, 2, 4]
    np.testing.assert_allclose(basis @ basis.T, np.diag([1, 1, 1, 0, 1]), atol=1e-12)
    np.testing.assert_allclose(rows @ basis.T @ basis, rows, atol=1e-9)


@pytest.mark.parametrize("kernels", [cpu, reference])
@pytest.mark.parametrize("name", ["row_products", "column_products"])
def test_sizes_are_checked(kernels, name):
    with pytest.raises(ValueError, match=name):
        getattr(kernels, name)(np.ones(11, np.float32), np.ones(4, np.float32), 1, np.ones(3, np.float32))
    with pytest.raises(ValueError, match="outer_sum"):
        kernels.outer_sum(np.ones(4, np.float32), np.ones(3, np.float32), 1, 0.0, np.ones(11, np.float32))
    with pytest.raises(ValueError, match="normalize_rows"):
        kernels.normalize_rows(np.ones(4, np.float32), 2, 1.0, np.ones(6, np.float32))
