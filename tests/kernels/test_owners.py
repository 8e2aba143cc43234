"""Owners of positions: each position has one owner and one row, and any list is spread evenly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gradwire.kernels import cpu, reference

SIZE = 40_000
SETS = {
    "consecutive": np.arange(2000),
    "every seventh": 7 * np.arange(2000),
    "every eighth": 8 * np.arange(2000),
    "random": np.sort(np.random.default_rng(0).choice(SIZE, 2000, replace=False)),
    "none": np.arange(0),
    "one": np.array([SIZE - 1]),
}


def split(kernels, index, owners, key=12):
    """The rows and values of each owner."""
    values = np.arange(1, index.size + 1, dtype=np.float32)
    rows, out = np.empty(index.size, np.uint32), np.empty(index.size, np.float32)
    starts = np.empty(owners + 1, np.int64)
    kernels.split_by_owner(index, values, key, owners, rows, out, starts)
    return [(rows[a:b], out[a:b]) for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("places", SETS)
@pytest.mark.parametrize("owners", [1, 2, 3, 8, 100])
def test_every_pair_goes_to_one_owner_and_comes_back(kernels, places, owners):
    index = SETS[places].astype(np.uint32)
    dense = np.zeros(SIZE, np.float32)
    for owner, (rows, values) in enumerate(split(kernels, index, owners)):
        assert (np.diff(rows.astype(np.int64)) > 0).all(), "each owner has one position of a row"
        assert (rows < -(-SIZE // owners)).all()
        positions = np.empty(rows.size, np.uint32)
        kernels.owned_positions(rows, owner, 12, owners, positions)
        assert (dense[positions] == 0).all()
        dense[positions] = values
    np.testing.assert_array_equal(np.flatnonzero(dense), index)
    np.testing.assert_array_equal(dense[index], np.arange(1, index.size + 1))


@pytest.mark.parametrize("places", SETS)
@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
@pytest.mark.parametrize("owners", [1, 3, 8])
def test_backends_agree(places, dtype, owners):
    index = SETS[places].astype(dtype)
    for mine, theirs in zip(split(cpu, index, owners), split(reference, index, owners), strict=True):
        np.testing.assert_array_equal(mine[0], theirs[0])
        np.testing.assert_array_equal(mine[1], theirs[1])


@pytest.mark.parametrize("places", ["consecutive", "every seventh", "every eighth", "random"])
def test_owners_have_as_much_as_by_chance_or_more_evenly(places):
    """Over 300 keys and 8 owners: the mean of each owner, and the variance of a binomial at most (and its error)."""
    counts = np.array(
        [[rows.size for rows, _ in split(cpu, SETS[places].astype(np.uint32), 8, key)] for key in range(300)]
    )
    assert counts.sum(1).tolist() == [2000] * 300
    deviation = (2000 / 8 * 7 / 8) ** 0.5
    assert np.abs(counts.mean(0) - 250).max() < 5 * deviation / 300**0.5
    assert counts.std() < 1.15 * deviation


@pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])
def test_buffers_of_a_wrong_length_are_refused(kernels):
    index, values = np.arange(5, dtype=np.uint32), np.ones(5, np.float32)
    with pytest.raises(ValueError, match="starts"):
        kernels.split_by_owner(index, values, 1, 3, index.copy(), values.copy(), np.empty(3, np.int64))
    with pytest.raises(ValueError, match="rows"):
        kernels.split_by_owner(index, values, 1, 3, index[:4].copy(), values.copy(), np.empty(4, np.int64))
    with pytest.raises(ValueError, match="index"):
        kernels.owned_positions(index, 0, 1, 3, np.empty(4, np.uint32))
