"""What is carried from step to step: staged, committed, rolled back and saved with the residuals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.core.errors import UnknownNameError
from gradwire.core.spec import TensorSpec
from gradwire.feedback import Residuals

SPECS = {"a": TensorSpec((4,)), "b": TensorSpec((4,))}


def ones(value: float) -> np.ndarray:
    return np.full(3, value, np.float32)


def held(residuals: Residuals, name: str) -> float | None:
    found = residuals.carried.get(name)
    return None if found is None else float(found[0])


def test_stages_chain_and_only_a_commit_keeps_them() -> None:
    residuals = Residuals()
    assert held(residuals, "a") is None
    residuals.carried.stage("a", ones(1))
    residuals.carried.stage("a", ones(2))
    assert held(residuals, "a") == 2
    residuals.rollback()
    assert held(residuals, "a") is None
    residuals.carried.stage("a", ones(3))
    residuals.commit()
    residuals.carried.stage("a", ones(4))
    assert held(residuals, "a") == 4
    residuals.rollback()
    assert held(residuals, "a") == 3
    assert residuals.nbytes == 12
    residuals.drop("a")
    assert held(residuals, "a") is None


def test_state_is_the_committed_one_and_only_where_there_is_any() -> None:
    residuals = Residuals()
    residuals.carried.stage("a", ones(1))
    assert "carried" not in residuals.state_dict()
    residuals.commit()
    residuals.carried.stage("a", ones(2))
    state = residuals.state_dict()
    assert torch.equal(state["carried"]["a"], torch.ones(3))
    state["carried"]["b"] = torch.full((3,), 7.0)
    residuals.load_state_dict(state, SPECS)
    assert (held(residuals, "a"), held(residuals, "b")) == (1, 7)


def test_the_state_of_a_rank_that_has_left_fills_only_gaps() -> None:
    residuals, left = Residuals(), Residuals()
    residuals.carried.stage("a", ones(1))
    residuals.commit()
    for name in SPECS:
        left.carried.stage(name, ones(5))
    left.commit()
    residuals.load_state_dict(left.state_dict(), SPECS, merge=True)
    assert (held(residuals, "a"), held(residuals, "b")) == (1, 5)


@pytest.mark.parametrize(
    ("carried", "kind", "message"),
    [
        ({"c": torch.ones(3)}, UnknownNameError, "Unknown|known"),
        ({"a": torch.ones(3, dtype=torch.float64)}, TypeError, "float32"),
        ({"a": torch.full((3,), torch.nan)}, ValueError, "finite"),
        ([1], TypeError, "Expected a dict"),
    ],
)
def test_a_state_is_checked_before_anything_is_replaced(carried: object, kind: type, message: str) -> None:
    residuals = Residuals()
    residuals.carried.stage("a", ones(1))
    residuals.commit()
    with pytest.raises(kind, match=message):
        residuals.load_state_dict({"version": 1, "carried": carried}, SPECS)
    assert held(residuals, "a") == 1
