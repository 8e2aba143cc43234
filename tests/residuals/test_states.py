"""States of compressors: staged, committed, rolled back and saved with the residuals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.core.errors import UnknownNameError
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.residuals import Residuals
from gradwire.residuals.states import common_states

SPECS = {"a": TensorSpec((4,)), "b": TensorSpec((4,))}
WHOLE = ElementRange(0, 4)


def stage(residuals: Residuals, name: str, value: float, step: int = 0, where: ElementRange = WHOLE) -> None:
    residuals.states.stage(name, where, np.full(3, value, np.float32), step)


def held(residuals: Residuals, name: str, step: int = 9, where: ElementRange = WHOLE) -> float | None:
    found = residuals.states.get(name, where, step)
    return None if found is None else float(found[0])


def test_stages_chain_and_only_a_commit_keeps_them() -> None:
    residuals = Residuals()
    assert held(residuals, "a") is None
    stage(residuals, "a", 1)
    stage(residuals, "a", 2, step=1)
    assert held(residuals, "a") == 2
    residuals.rollback()
    assert held(residuals, "a") is None
    stage(residuals, "a", 3)
    residuals.commit()
    stage(residuals, "a", 4)
    assert held(residuals, "a") == 4
    residuals.rollback()
    assert held(residuals, "a") == 3
    residuals.states.stage("a", WHOLE, None, 1)
    assert held(residuals, "a") == 3, "None keeps it"
    assert residuals.nbytes == 12
    residuals.states.drop("a")
    assert held(residuals, "a") is None


def test_a_state_is_for_the_steps_after_the_one_that_staged_it() -> None:
    residuals = Residuals()
    stage(residuals, "a", 1)
    residuals.commit()
    stage(residuals, "a", 2, step=5)
    stage(residuals, "a", 3, step=5)
    assert (held(residuals, "a", step=5), held(residuals, "a", step=6)) == (1, 2), "the first of a step counts"
    stage(residuals, "a", 4, step=6)
    assert (held(residuals, "a", step=6), held(residuals, "a", step=7)) == (2, 4)


def test_a_state_belongs_to_one_range_and_is_dropped_when_another_overlaps_it() -> None:
    residuals = Residuals()
    left, right, middle = ElementRange(0, 2), ElementRange(2, 2), ElementRange(1, 2)
    for value, where in enumerate((left, right)):
        stage(residuals, "a", value, where=where)
    residuals.commit()
    assert [held(residuals, "a", where=where) for where in (left, right, middle)] == [0, 1, None]
    stage(residuals, "a", 2, step=1, where=middle)
    residuals.commit()
    assert [held(residuals, "a", where=where) for where in (left, right, middle)] == [None, None, 2]


def test_only_committed_states_are_saved() -> None:
    residuals = Residuals()
    stage(residuals, "a", 1)
    assert "states" not in residuals.state_dict()
    residuals.commit()
    stage(residuals, "a", 2)
    state = residuals.state_dict()
    assert torch.equal(state["states"]["a"]["0:4"], torch.ones(3))
    state["states"]["b"] = {"0:4": torch.full((3,), 7, dtype=torch.uint8)}
    residuals.load_state_dict(state, SPECS)
    assert (held(residuals, "a"), held(residuals, "b")) == (1, 7)


def test_the_state_of_a_rank_that_has_left_fills_only_gaps() -> None:
    residuals, left = Residuals(), Residuals()
    stage(residuals, "a", 1)
    residuals.commit()
    for name in SPECS:
        stage(left, name, 5)
    left.commit()
    residuals.load_state_dict(left.state_dict(), SPECS, merge=True)
    assert (held(residuals, "a"), held(residuals, "b")) == (1, 5)


def test_common_states_are_those_that_are_equal_on_all_ranks() -> None:
    saved = [{"a": {"0:4": torch.ones(3)}, "b": {"0:4": torch.full((1,), float(rank))}} for rank in range(2)]
    assert list(common_states(saved)) == ["a"]
    assert common_states([saved[0], {}]) == {}


@pytest.mark.parametrize(
    ("states", "kind", "message"),
    [
        ({"c": {"0:4": torch.ones(3)}}, UnknownNameError, "Unknown|known"),
        ({"a": {"0:4": torch.ones(3, dtype=torch.float64)}}, TypeError, "1-D tensor of float32 or uint8"),
        ({"a": {"0:4": torch.full((3,), torch.nan)}}, ValueError, "finite"),
        ({"a": {"0": torch.ones(3)}}, ValueError, "must have an element range as key"),
        ({"a": torch.ones(3)}, TypeError, "must be a dict"),
        ([1], TypeError, "must be a dict"),
    ],
)
def test_a_state_is_checked_before_anything_is_replaced(states: object, kind: type, message: str) -> None:
    residuals = Residuals()
    stage(residuals, "a", 1)
    residuals.commit()
    with pytest.raises(kind, match=message):
        residuals.load_state_dict({"version": 2, "states": states}, SPECS)
    assert held(residuals, "a") == 1
