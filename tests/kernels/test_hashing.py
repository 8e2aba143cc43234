"""Hashing to slots: universal, different for each key, and the largest of several elements in a slot is kept."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.core.context import Context
from gradwire.kernels.cpu.hashing import keep_hashed
from gradwire.kernels.reference.hashing import hash_numbers, hash_slots

SETS = {
    "consecutive": lambda count: np.arange(count),
    "equal distances": lambda count: 4096 * np.arange(count) + 5,
    "random places": lambda count: np.sort(np.random.default_rng(0).choice(1 << 24, count, replace=False)),
}


def key_of(step: int) -> int:
    return Context("fc.weight", step=step, seed=3).private_key


def winners(index: np.ndarray, value: np.ndarray, slots: int, key: int) -> list[int]:
    """Expected content of the slots: the largest magnitude, and of equal ones the first position."""
    table: dict[int, int] = {}
    for slot, j in zip(hash_slots(index, *hash_numbers(key), slots).tolist(), range(index.size)):
        if slot not in table or abs(value[j]) > abs(value[table[slot]]):
            table[slot] = j
    return sorted(table.values())


@pytest.mark.parametrize("places", SETS)
@pytest.mark.parametrize(("slots", "low", "high"), [(1024, 0.36, 0.38), (512, 0.13, 0.14)])
def test_coverage_is_that_of_balls_in_bins(places: str, slots: int, low: float, high: float) -> None:
    """The paper's figures, as means over 1,000 seeds, of survivors in any places."""
    index, empty = SETS[places](1024), []
    for step in range(1000):
        filled = np.bincount(hash_slots(index, *hash_numbers(key_of(step)), slots), minlength=slots)
        empty.append(np.count_nonzero(filled == 0) / slots)
    assert low <= np.mean(empty) <= high
    assert abs(np.mean(empty) - (1 - 1 / slots) ** 1024) < 0.002


@pytest.mark.parametrize("slots", [7, 64, 1000])
def test_two_positions_share_a_slot_as_often_as_chance_has_it(slots: int) -> None:
    """Universality over 4,000 keys, for pairs in several relations, within five standard errors."""
    pairs = np.array([[0, 1], [5, 5 + 2**16], [3, 3 * 2**20], [2**31, 2**32 - 1]])
    keys = [hash_numbers(key_of(step)) for step in range(4000)]
    for pair in pairs:
        shared = np.mean([len(set(hash_slots(pair, a, b, slots).tolist())) == 1 for a, b in keys])
        assert abs(shared - 1 / slots) <= 5 * np.sqrt(1 / slots / 4000)


@pytest.mark.parametrize("slots", [0, 1, 3, 100, 5000])
@pytest.mark.parametrize("num_sizes", [2, 1 << 30])
def test_the_largest_of_those_that_meet_stays(slots: int, num_sizes: int) -> None:
    for step, places in enumerate(SETS):
        index = SETS[places](1000).astype(np.uint32)
        rng, key = np.random.default_rng(0), key_of(step)
        value = (rng.integers(0, num_sizes, 1000) * rng.choice([-1, 1], 1000)).astype(np.float32)
        wanted = winners(index, value, slots, key) if slots else []
        keys, largest = np.array([1, 2, key & 0xFFFFFFFF, key >> 32], np.uint32), np.full(5000, 77, np.uint32)
        expected = index[wanted].tolist(), value[wanted].tolist()
        kept = keep_hashed(index, value, 1000, largest, slots, np.empty(1000, np.uint32), keys)
        assert (index[:kept].tolist(), value[:kept].tolist()) == expected
