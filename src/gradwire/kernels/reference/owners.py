"""Owners of positions: lists of (position, value) pairs are split into one list per rank, equally long on average.

Positions are in rows of W. A row is a whole turn of the W owners, from an owner on that a hash of the row chooses. So
each owner has one position of each row, and a position is an owner and a row. The pairs of any list, however skewed,
are spread as evenly as by a hash of each position or more evenly, since neighbors never meet.

Source: Wang et al. 2025 (ZEN), balanced parallelism by hashing. Differences: ZEN hashes each position, and needs tables
to enumerate an owner's positions.
"""
# Shapes: K = pairs, W = owners

from __future__ import annotations

import numpy as np

from gradwire.kernels.layout import expect_size
from gradwire.kernels.reference.hashing import hash_numbers, hash_slots


def split_by_owner(
    index: np.ndarray, values: np.ndarray, key: int, owners: int, rows: np.ndarray, out: np.ndarray, starts: np.ndarray
) -> None:
    """Sort pairs by owner. The order of an owner's pairs stays, so that ascending positions have ascending rows.

    Args:
        index: Positions below 2^32.
        values: float32[K].
        key: Key of the hash function.
        owners: Number of owners.
        rows: Receives the row of each pair, uint32[K].
        out: Receives the values, float32[K].
        starts: Receives the first pair of each owner and, last, their number: int64[W + 1].
    """
    for name, array, size in (("values", values, index.size), ("rows", rows, index.size), ("out", out, index.size)):
        expect_size("split_by_owner", name, array, size)
    expect_size("split_by_owner", "starts", starts, owners + 1)
    index = index.astype(np.int64)
    found = index // owners
    owner = (index - hash_slots(found, *hash_numbers(key), owners)) % owners
    order = np.argsort(owner, kind="stable")
    rows[:], out[:] = found[order], values[order]
    starts[0] = 0
    starts[1:] = np.cumsum(np.bincount(owner, minlength=owners))


def owned_positions(rows: np.ndarray, owner: int, key: int, owners: int, index: np.ndarray) -> None:
    """Write the position of `owner` in each row to `index`, uint32[K]."""
    expect_size("owned_positions", "index", index, rows.size)
    wide = rows.astype(np.int64)
    index[:] = wide * owners + (owner + hash_slots(wide, *hash_numbers(key), owners)) % owners
