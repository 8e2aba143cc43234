"""Owners of positions. Contracts: `reference.owners`."""
# Shapes: K = pairs, W = owners

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import as_writable
from gradwire.kernels.cpu.hashing import hash_slot
from gradwire.kernels.layout import expect_size
from gradwire.kernels.reference.hashing import hash_numbers


@kernel
def _place(position, a, b, owners):
    """Row and owner of a position. All arguments are uint64."""
    row = position // owners
    return row, (position + owners - hash_slot(row, a, b, owners)) % owners


@kernel
def _split(index, values, a, b, owners, rows, out, starts):
    starts[:] = 0
    for j in range(index.size):
        _, owner = _place(np.uint64(index[j]), a, b, owners)
        starts[owner + np.uint64(1)] += 1
    for owner in range(1, starts.size):
        starts[owner] += starts[owner - 1]
    for j in range(index.size):  # moves each start to the next one's place
        row, owner = _place(np.uint64(index[j]), a, b, owners)
        at = starts[owner]
        rows[at], out[at] = row, values[j]
        starts[owner] = at + 1
    for owner in range(starts.size - 1, 0, -1):
        starts[owner] = starts[owner - 1]
    starts[0] = 0


@kernel
def _positions(rows, owner, a, b, owners, index):
    for j in range(rows.size):
        row = np.uint64(rows[j])
        index[j] = row * owners + (owner + hash_slot(row, a, b, owners)) % owners


def _numbers(key: int) -> tuple[np.uint64, np.uint64]:
    a, b = hash_numbers(key)
    return np.uint64(a), np.uint64(b)


def split_by_owner(
    index: np.ndarray, values: np.ndarray, key: int, owners: int, rows: np.ndarray, out: np.ndarray, starts: np.ndarray
) -> None:
    for name, array, size in (("values", values, index.size), ("rows", rows, index.size), ("out", out, index.size)):
        expect_size("split_by_owner", name, array, size)
    expect_size("split_by_owner", "starts", starts, owners + 1)
    _split(as_writable(index), as_writable(values), *_numbers(key), np.uint64(owners), rows, out, starts)


def owned_positions(rows: np.ndarray, owner: int, key: int, owners: int, index: np.ndarray) -> None:
    expect_size("owned_positions", "index", index, rows.size)
    _positions(as_writable(rows), np.uint64(owner), *_numbers(key), np.uint64(owners), index)
