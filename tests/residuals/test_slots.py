"""Residuals that are staged together end up as those that are staged one by one, whatever happens between."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from gradwire.core.spec import ElementRange
from gradwire.residuals.slices import ResidualKey
from gradwire.residuals.transaction import Residuals

COUNTS = (5, 3, 8)
KEYS = [ResidualKey(f"t{index}", ElementRange(0, count)) for index, count in enumerate(COUNTS)]


def at(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array(ctypes.cast(int(address), ctypes.POINTER(ctypes.c_float)), (count,))


@pytest.mark.parametrize("seed", range(40))
def test_a_random_schedule_gives_the_same_residuals(seed: int) -> None:
    rng = np.random.default_rng(seed)
    one_by_one, together = Residuals(), Residuals()
    slots = together.slots(KEYS)
    # Most steps are the usual ones, so that buffers alternate for a while and are then disturbed.
    for value in range(60):
        action = rng.choice(["step", "chain", "rollback", "partial", "unused", "single", "empty", "scale"],
                            p=[0.6, 0.08, 0.07, 0.05, 0.05, 0.05, 0.05, 0.05])  # fmt: skip
        for _ in range(2 if action == "chain" else 0 if action == "empty" else 1):
            used = [action != "unused" or bool(rng.integers(2)) for _ in KEYS]
            before, after = slots.stage(used)
            for index, key in enumerate(KEYS):
                if not used[index]:
                    assert before[index] == after[index] == 0
                    continue
                source = one_by_one.source(key)
                expected = np.zeros(COUNTS[index], np.float32) if source is None else source
                found = at(before[index], COUNTS[index])
                np.testing.assert_array_equal(found, expected)
                one_by_one.stage(key)[:] = expected * 0.5 + value
                at(after[index], COUNTS[index])[:] = found * 0.5 + value
        if action == "single":
            for each in (one_by_one, together):
                each.stage(KEYS[1])[:] = -value
        for each in (one_by_one, together):
            if action == "rollback":
                each.rollback()
            elif action == "partial":
                each.commit([KEYS[0].name])
            else:
                each.commit()
            if action == "scale":
                each.scale(2.0)
        assert one_by_one.is_open == together.is_open
    one_by_one.commit()
    together.commit()
    for key in KEYS:
        np.testing.assert_array_equal(one_by_one.source(key), together.source(key))
