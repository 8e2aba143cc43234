"""Residuals against a float64 model: nothing is lost, and a rollback is exact to the bit."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gradwire.core.errors import UnknownNameError
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.residuals import ResidualKey, Residuals
from gradwire.residuals.slices import ROLES, Role

SIZES = {"a": 24, "b": 7}
SPECS = {name: TensorSpec((size,)) for name, size in SIZES.items()}


def stage(residuals: Residuals, key: ResidualKey, values: np.ndarray) -> None:
    residuals.stage(key)[:] = values


def held(residuals: Residuals, name: str) -> np.ndarray:
    """Residual of the full parameter, summed over both roles, float64."""
    total = np.zeros(SIZES[name])
    found = residuals.total().get(name, np.empty(0))
    total[: found.size] = found
    return total


def latest(residuals: Residuals, name: str, role: Role) -> np.ndarray:
    """What a role holds of the full parameter, in the open chain. Asking by key would move it."""
    total = np.zeros(SIZES[name])
    for elements, found in residuals._table.slices.get((name, role), {}).items():
        if found.latest() is not None:
            total[elements.offset : elements.end] = found.latest()
    return total


def cuts(name: str) -> st.SearchStrategy[list[ElementRange]]:
    """Return a strategy for splits of a parameter into ranges."""
    points = st.lists(st.integers(1, SIZES[name] - 1), max_size=3, unique=True).map(sorted)
    return points.map(
        lambda inner: [ElementRange(a, b - a) for a, b in zip([0, *inner], [*inner, SIZES[name]], strict=True)]
    )


class ResidualMachine(RuleBasedStateMachine):
    """Any order of stage, commit, rollback, save and load, and re-slicing.

    The model holds what has been produced, less what has been applied: each encode of x + residual "sends" a
    random part of it. Values are small integers, so that float32 sums are exact and equality is to the bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.residuals = Residuals()
        # Residuals of both roles together, committed and in the open chain: exact and dense.
        self.committed = {name: np.zeros(size) for name, size in SIZES.items()}
        self.latest = {name: value.copy() for name, value in self.committed.items()}
        self.at_commit = self.bits()

    def bits(self) -> dict[str, bytes]:
        return {name: held(self.residuals, name).tobytes() for name in SIZES}

    @rule(data=st.data(), name=st.sampled_from(sorted(SIZES)), role=st.sampled_from(ROLES))
    def encode(self, data: st.DataObject, name: str, role: str) -> None:
        partition = data.draw(cuts(name))
        where = data.draw(st.sampled_from(partition))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
        grad = rng.integers(-8, 9, where.count).astype(np.float32)
        sent = rng.integers(-8, 9, where.count).astype(np.float32)
        own, whole = latest(self.residuals, name, role), self.latest[name]
        key = ResidualKey(name, where, role)
        source = self.residuals.source(key)
        before = np.zeros(where.count, np.float32) if source is None else source.copy()
        within = slice(where.offset, where.end)
        assert np.array_equal(before, own[within]) or np.array_equal(before, whole[within]), "of one role, or of both"
        stage(self.residuals, key, before + grad - sent)
        self.latest[name][within] += grad - sent

    @rule(names=st.none() | st.sets(st.sampled_from(sorted(SIZES))))
    def commit(self, names: set[str] | None) -> None:
        self.residuals.commit(names)
        self.committed |= {name: value.copy() for name, value in self.latest.items() if names is None or name in names}
        self.at_commit = self.bits()

    @rule()
    def rollback(self) -> None:
        self.residuals.rollback()
        self.latest = {key: value.copy() for key, value in self.committed.items()}
        assert self.bits() == self.at_commit

    @rule(data=st.data(), name=st.sampled_from(sorted(SIZES)), role=st.sampled_from(ROLES))
    def reslice(self, data: st.DataObject, name: str, role: str) -> None:
        for where in data.draw(cuts(name)):
            self.residuals.source(ResidualKey(name, where, role))

    @rule(merge=st.booleans())
    def save_and_load(self, merge: bool) -> None:
        file = io.BytesIO()
        torch.save(self.residuals.state_dict(), file)
        file.seek(0)
        self.residuals = Residuals()
        self.residuals.load_state_dict(torch.load(file, weights_only=True), SPECS, merge=merge)
        self.latest = {key: value.copy() for key, value in self.committed.items()}
        assert self.bits() == self.at_commit

    @invariant()
    def nothing_is_lost(self) -> None:
        for name in SIZES:
            np.testing.assert_array_equal(held(self.residuals, name), self.committed[name])
            both = sum(latest(self.residuals, name, role) for role in ROLES)
            np.testing.assert_array_equal(both, self.latest[name])

    @invariant()
    def at_most_two_buffers_an_element(self) -> None:
        assert self.residuals.nbytes <= 2 * 4 * len(ROLES) * sum(SIZES.values())


TestResidualMachine = ResidualMachine.TestCase
TestResidualMachine.settings = settings(max_examples=60, stateful_step_count=25)


def test_a_role_takes_over_from_the_other_when_it_is_asked_for() -> None:
    residuals = Residuals()
    stage(residuals, ResidualKey("a", ElementRange(0, 24)), np.arange(24))
    residuals.commit()
    stage(residuals, ResidualKey("a", ElementRange(8, 8), "aggregate"), np.full(8, 1))
    residuals.rollback()
    np.testing.assert_array_equal(residuals.source(ResidualKey("a", ElementRange(8, 8), "aggregate")), np.arange(8, 16))
    np.testing.assert_array_equal(residuals.source(ResidualKey("a", ElementRange(0, 8))), np.arange(8))
    np.testing.assert_array_equal(held(residuals, "a"), np.arange(24))


def test_roles_that_are_both_staged_between_commits_keep_their_own_until_one_of_them_is_not() -> None:
    residuals = Residuals()
    local, aggregate = (ResidualKey("a", ElementRange(0, 24), role) for role in ROLES)
    for step in range(3):
        if step == 2:
            state, residuals = residuals.state_dict(), Residuals()
            residuals.load_state_dict(state, SPECS)
        for key, error in ((local, 1), (aggregate, 10)):
            before = residuals.source(key)
            np.testing.assert_array_equal(np.zeros(24) if before is None else before, np.full(24, step * error))
            stage(residuals, key, np.full(24, (step + 1) * error))
        residuals.commit()
    stage(residuals, local, residuals.source(local) + 1)
    residuals.commit()
    np.testing.assert_array_equal(residuals.source(local), np.full(24, 4 + 30))
    assert held(residuals, "a").sum() == 24 * 34


def test_rollback_restores_every_bit_even_those_that_compare_equal() -> None:
    residuals, key = Residuals(), ResidualKey("a", ElementRange(0, 4))
    odd = np.array([-0.0, 1e-45, -3.4e38, 1 / 3], np.float32)
    stage(residuals, key, odd)
    residuals.commit()
    for _ in range(3):  # a chain, the second and third in place
        stage(residuals, key, np.full(4, 7, np.float32))
    residuals.rollback()
    assert residuals.source(key).tobytes() == odd.tobytes()


def test_a_chain_stages_in_place_and_commit_swaps_two_buffers() -> None:
    residuals, key = Residuals(), ResidualKey("a", ElementRange(0, 4))
    stage(residuals, key, np.ones(4))
    assert residuals.source(key) is residuals.stage(key)
    residuals.commit()
    state = residuals.source(key)
    assert residuals.stage(key) is not state
    residuals.commit()
    assert residuals.stage(key) is state
    assert residuals.nbytes == 2 * 16


def test_nothing_is_allocated_before_the_first_stage() -> None:
    residuals = Residuals()
    assert residuals.source(ResidualKey("a", ElementRange(0, 1 << 40))) is None
    assert residuals.nbytes == 0
    assert residuals.state_dict() == {"version": 2, "local": {}, "aggregate": {}}


def test_reslicing_in_an_open_chain_keeps_both_states() -> None:
    residuals = Residuals()
    stage(residuals, ResidualKey("a", ElementRange(0, 12)), np.arange(12))
    stage(residuals, ResidualKey("a", ElementRange(12, 12)), np.arange(12, 24))
    residuals.commit()
    stage(residuals, ResidualKey("a", ElementRange(0, 12)), np.full(12, -1))
    np.testing.assert_array_equal(
        residuals.source(ResidualKey("a", ElementRange(10, 4))), np.array([-1, -1, 12, 13], np.float32)
    )
    np.testing.assert_array_equal(residuals.source(ResidualKey("a", ElementRange(0, 10))), np.full(10, -1))
    residuals.rollback()
    np.testing.assert_array_equal(residuals.source(ResidualKey("a", ElementRange(0, 24))), np.arange(24))


def test_threads_stage_different_keys_at_once() -> None:
    residuals = Residuals()

    def work(thread: int) -> None:
        for index in range(200):
            stage(residuals, ResidualKey(f"p{thread}.{index % 20}", ElementRange(0, 8)), np.full(8, index))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    residuals.commit()
    totals = residuals.total()
    assert len(totals) == 80
    assert all((totals[f"p{thread}.{slot}"] == 180 + slot).all() for thread in range(4) for slot in range(20))


def test_state_is_by_parameter_name_and_flattens_for_safetensors(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    residuals = Residuals()
    stage(residuals, ResidualKey("a", ElementRange(0, 3)), np.arange(3))
    stage(residuals, ResidualKey("a", ElementRange(3, 21), "aggregate"), np.ones(21))
    residuals.commit()
    state = residuals.state_dict()
    assert sorted(state) == ["aggregate", "local", "version"]
    assert list(state["aggregate"]["a"]) == ["3"]
    flat = {
        f"{role}/{name}/{at}": values
        for role in ROLES
        for name in state[role]
        for at, values in state[role][name].items()
    }
    save_file(flat, tmp_path / "residuals.safetensors")
    nested: dict = {"version": state["version"]}
    for path, values in load_file(tmp_path / "residuals.safetensors").items():
        role, name, at = path.split("/")
        nested.setdefault(role, {}).setdefault(name, {})[at] = values
    again = Residuals()
    again.load_state_dict(nested, SPECS)
    np.testing.assert_array_equal(again.total()["a"], residuals.total()["a"])
    assert again.norms() == {"a": {"local": 5**0.5, "aggregate": 21**0.5}}


def test_the_state_is_a_copy_and_holds_no_staged_values() -> None:
    residuals, key = Residuals(), ResidualKey("b", ElementRange(0, 7))
    stage(residuals, key, np.ones(7))
    residuals.commit()
    state = residuals.state_dict()
    stage(residuals, key, np.full(7, 5))
    assert torch.equal(residuals.state_dict()["local"]["b"]["0"], torch.ones(7))
    residuals.commit()
    assert torch.equal(state["local"]["b"]["0"], torch.ones(7))


def test_merging_the_state_of_a_rank_that_left_adds() -> None:
    stayed, left = Residuals(), Residuals()
    stage(stayed, ResidualKey("a", ElementRange(0, 12)), np.ones(12))
    stage(left, ResidualKey("a", ElementRange(6, 18)), np.full(18, 2))
    stayed.commit()
    left.commit()
    stayed.load_state_dict(left.state_dict(), SPECS, merge=True)
    np.testing.assert_array_equal(stayed.total()["a"], [1] * 6 + [3] * 6 + [2] * 12)


@pytest.mark.parametrize(
    ("state", "error", "advice"),
    [
        ({"version": 9}, ValueError, "dict of version 2, but this is version 9"),
        (["version"], ValueError, "dict of version 2, but this is a list"),
        ({"version": 2, "lokal": {}}, UnknownNameError, "Did you mean 'local'"),
        ({"version": 2, "local": {"c": {}}}, UnknownNameError, "Known: a, b"),
        ({"version": 2, "local": {"b": torch.zeros(7)}}, TypeError, "'b' in the residual state must be a dict"),
        ({"version": 2, "local": {"b": {"x": torch.zeros(7)}}}, ValueError, "must have element offsets as keys"),
        ({"version": 2, "local": {"b": {"0": torch.zeros(8)}}}, ValueError, "b has 7 elements, but"),
        ({"version": 2, "local": {"b": {"0": torch.zeros(7).half()}}}, TypeError, "1-D float32"),
        ({"version": 2, "local": {"b": {"0": [0.0] * 7}}}, TypeError, "residual of b must be a tensor"),
        ({"version": 2, "local": {"b": {"0": torch.full((7,), torch.nan)}}}, ValueError, "finite"),
        ({"version": 2, "local": {"b": {"0": torch.ones(5), "4": torch.ones(3)}}}, ValueError, "merge=True"),
    ],
)  # fmt: skip
def test_a_state_of_something_else_is_refused_as_a_whole(state, error, advice) -> None:
    residuals = Residuals()
    stage(residuals, ResidualKey("b", ElementRange(0, 7)), np.ones(7))
    residuals.commit()
    with pytest.raises(error, match=advice):
        residuals.load_state_dict(state, SPECS)
    np.testing.assert_array_equal(residuals.total()["b"], np.ones(7))


def test_moving_state_in_an_open_chain_is_refused_with_advice() -> None:
    residuals, key = Residuals(), ResidualKey("a", ElementRange(0, 4))
    stage(residuals, key, np.ones(4))
    for move in (
        lambda: residuals.add(key, np.ones(4, np.float32)),
        lambda: residuals.drop_velocity("a"),
        lambda: residuals.load_state_dict({"version": 2}, SPECS, merge=True),
    ):
        with pytest.raises(RuntimeError, match="commit\\(\\) or rollback\\(\\) first"):
            move()


def test_adding_the_wrong_number_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="range of a has 4 elements, but the values have shape \\(3,\\)"):
        Residuals().add(ResidualKey("a", ElementRange(0, 4)), np.ones(3, np.float32))


def test_scaling_keeps_residuals_finite() -> None:
    residuals, key = Residuals(), ResidualKey("b", ElementRange(0, SIZES["b"]))
    stage(residuals, key, np.full(7, 3e38, np.float32))
    residuals.commit()
    stage(residuals, key, np.full(7, -1e38, np.float32))
    residuals.scale(2.0**16)
    largest = np.finfo(np.float32).max
    assert held(residuals, "b").tolist() == [largest] * 7
    residuals.commit()
    assert held(residuals, "b").tolist() == [-largest] * 7
