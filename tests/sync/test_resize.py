"""Resuming with another number of ranks: the sum of residuals of both roles stays the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.core.errors import OptionError
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.residuals.slices import ROLES, ResidualKey
from gradwire.residuals.transaction import Residuals
from gradwire.sync.plan import Plan
from gradwire.sync.resize import resize_state
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import ranks

SIZES = {"a": 2500, "b": 7}
SPECS = {name: TensorSpec((size,)) for name, size in SIZES.items()}


def state_of(rank: int, world_size: int, residuals: Residuals, **others: Any) -> dict[str, Any]:
    state = {"version": 2, "step": 9, "seed": 4, "rank": rank, "world_size": world_size}
    return {**state, "residuals": residuals.state_dict(), **others}


@st.composite
def jobs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """States of 1 to 5 ranks, each with some ranges of some parameters in either role."""
    source = np.random.default_rng(draw(st.integers(0, 2**32)))
    world_size, states = draw(st.integers(1, 5)), []
    for rank in range(world_size):
        residuals = Residuals()
        for name, size in SIZES.items():
            for role in ROLES:
                ends = draw(st.lists(st.integers(0, size), max_size=4, unique=True).map(sorted))
                for start, end in zip(ends[::2], ends[1::2]):
                    values = source.normal(size=end - start).astype(np.float32)
                    residuals.add(ResidualKey(name, ElementRange(start, end - start), role), values)
        states.append(state_of(rank, world_size, residuals))
    return states


def total(states: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the sum over ranks and roles by parameter."""
    sums = {name: np.zeros(size) for name, size in SIZES.items()}
    for state in states:
        residuals = Residuals()
        residuals.load_state_dict(state["residuals"], SPECS)
        for name, values in residuals.total().items():
            sums[name][: values.size] += values
    return sums


@settings(max_examples=60)
@given(states=jobs(), world_sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_the_sum_over_ranks_and_roles_is_kept(states: list[dict[str, Any]], world_sizes: list[int]) -> None:
    before = total(states)
    for world_size in world_sizes:
        states = resize_state(states, world_size)
        assert [(state["rank"], state["world_size"]) for state in states] == [
            (rank, world_size) for rank in range(world_size)
        ]
        assert all((state["step"], state["seed"]) == (9, 4) for state in states)
    for name, values in total(states).items():
        assert np.allclose(values, before[name], rtol=0, atol=1e-5)


@settings(max_examples=20)
@given(states=jobs())
def test_the_same_number_of_ranks_keeps_every_bit(states: list[dict[str, Any]]) -> None:
    for state, found in zip(states, resize_state(states, len(states)), strict=True):
        for role in ROLES:
            for name, pieces in state["residuals"][role].items():
                assert found["residuals"][role][name].keys() == pieces.keys()
                for offset, values in pieces.items():
                    assert torch.equal(found["residuals"][role][name][offset], values)


def job(world_size: int, **others: Any) -> list[dict[str, Any]]:
    states = []
    for rank in range(world_size):
        residuals = Residuals()
        residuals.add(ResidualKey("a", ElementRange(0, 12)), np.full(12, rank + 1, np.float32))
        residuals.add(ResidualKey("b", ElementRange(rank, 1), "aggregate"), np.array([10.0], np.float32))
        states.append(state_of(rank, world_size, residuals, **others))
    return states


def test_the_rule() -> None:
    """Remaining ranks keep both roles. Residuals of ranks that leave are split evenly into local residuals."""
    before = job(4)
    found = resize_state(before, 3)
    expected = [[5.0] * 4 + [1.0] * 8, [2.0] * 4 + [6.0] * 4 + [2.0] * 4, [3.0] * 8 + [7.0] * 4]
    for rank, state in enumerate(found):
        assert state["residuals"]["local"]["a"]["0"].tolist() == expected[rank]
        assert state["residuals"]["aggregate"] == before[rank]["residuals"]["aggregate"]
    # The one element of `b` goes to a single rank.
    assert [list(state["residuals"]["local"].get("b", {})) for state in found] == [[], [], ["3"]]
    assert before[0]["residuals"]["local"]["a"]["0"].tolist() == [1.0] * 12, "the input is not touched"


def test_new_ranks_begin_without_residuals_and_with_everything_else() -> None:
    states = job(3, loss_scale=8.0)
    for state in states:
        state["residuals"]["states"] = {"a": {"0:12": torch.ones(4)}}  # of powersgd: the same on all ranks
    new = resize_state(states, 4)[3]
    assert new["residuals"].pop("states")["a"]["0:12"].tolist() == [1.0] * 4
    assert new["residuals"] == Residuals().state_dict()
    assert new["loss_scale"] == 8.0


def test_the_same_ranks_keep_states_of_their_own() -> None:
    states = job(2)
    for rank, state in enumerate(states):
        state["residuals"]["states"] = {"a": {"0:12": torch.full((4,), float(rank))}}  # of dragonn: of each rank
    found = resize_state(states, 2)
    assert [state["residuals"]["states"]["a"]["0:12"].tolist() for state in found] == [[0.0] * 4, [1.0] * 4]
    assert all("states" not in state["residuals"] for state in resize_state(states[::-1], 2))


def test_the_order_decides_which_ranks_stay() -> None:
    states = job(3)
    (state,) = resize_state([states[2], states[0], states[1]], 1)
    assert state["rank"] == 0
    assert state["residuals"]["aggregate"]["b"].keys() == {"2"}
    assert state["residuals"]["local"]["a"]["0"].tolist() == [6.0] * 12


@pytest.mark.parametrize(
    ("states", "world_size", "message"),
    [
        ([], 2, r"the states of ranks \[\]"),
        (job(3)[:2], 2, r"all have world_size 2, but they have \[3\]"),
        (job(3)[1:], 2, r"the states of ranks \[1, 2\]"),
        ([job(2)[0], job(2)[0]], 2, r"the states of ranks \[0, 0\]"),
        ([job(2)[0], {**job(2)[1], "step": 8}], 2, r"all have step 8, but they have \[8, 9\]"),
        ([job(2)[0], {**job(2)[1], "seed": 8}], 2, r"all have seed 4, but they have \[4, 8\]"),
        (job(2), 0, "cannot have 0 ranks"),
    ],
)
def test_states_that_do_not_belong_together_are_refused(states: Any, world_size: int, message: str) -> None:
    with pytest.raises(OptionError, match=message + r".* Pass the "):
        resize_state(states, world_size)


# -- with synchronizers --------------------------------------------------------------------------------------------

NUMEL = 9000
STEPS = 5


def gradient(phase: int, rank: int, step: int) -> torch.Tensor:
    seed = 10_000 * phase + 100 * rank + step
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("method", "strategy", "partitions"),
    [("onebit", "scatter_reduce", 1), ("threelc", "scatter_reduce", 2), ("topk", "ring", 1), ("topk", "allgather", 1)],
)
def test_produced_is_applied_plus_residuals(method: str, strategy: str, partitions: int) -> None:
    """4 → 3 → 4 ranks, each gradient divided by the world size of its time; then a dense step sends all residuals."""
    applied, produced = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    states: list[dict[str, Any]] = []

    def run(phase: int, one: Synchronizer) -> tuple[dict[str, Any], torch.Tensor]:
        one.register({"w": TensorSpec((NUMEL,))})
        if states:
            one.load_state_dict(states)
        seen = torch.zeros(NUMEL, dtype=torch.float64)
        for step in range(STEPS + (phase == 2)):
            if step == STEPS:
                one.replan(Plan({"w": "none"}))
            one.begin_step()
            mean = gradient(phase, one.rank, step)
            one.submit([GradientSlice("w", mean)])
            one.commit()
            seen += mean
        return one.state_dict(), seen

    for phase, world_size in enumerate((4, 3, 4)):
        with ranks(world_size, Plan({"w": method}, strategy=strategy, partitions=partitions)) as group:
            found = group.each(lambda one, phase=phase: run(phase, one))
        assert all(torch.equal(seen, found[0][1]) for _, seen in found)
        states = [state for state, _ in found]
        applied += found[0][1]
        for rank in range(world_size):
            for step in range(STEPS + (phase == 2)):
                produced += gradient(phase, rank, step).double() / world_size
        kept = torch.zeros(NUMEL, dtype=torch.float64)
        for state in states:
            residuals = Residuals()
            residuals.load_state_dict(state["residuals"], {"w": TensorSpec((NUMEL,))})
            values = residuals.total().get("w", np.zeros(0))
            kept[: values.size] += torch.from_numpy(values)
        assert (kept.abs().max().item() > 0.1) == (phase < 2), "there is something to lose"
        assert torch.allclose(applied + kept, produced, rtol=0, atol=1e-4)
