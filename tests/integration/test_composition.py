"""gradwire together with other features of torch, as docs/composition.md describes it."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

from tests.integration.jobs.composition import COMBINED, FEATURES
from tests.integration.launch import launch, results


@pytest.fixture(scope="module")
def of_two() -> list[dict[str, Any]]:
    """What two ranks found, by rank: one launch for several tests."""
    return results(launch("composition.of_two", 2))


def check_training(ranks: list[dict[str, Any]], names: set[str]) -> None:
    """Identical replicas that have learned, under the parameter names of the plain model."""
    assert set(ranks[0]) == names
    for name, first in ranks[0].items():
        assert all(rank[name]["hash"] == first["hash"] for rank in ranks), name
        assert all(rank[name]["last"] < 0.95 * rank[name]["first"] for rank in ranks), name
        assert first["names"] == ranks[0]["plain"]["names"], name


# Scales are powers of two and threelc follows its input, so a loss scale that residuals follow changes no bit. Neither
# do memory layout, graph and search.
SAME_BITS = {"scaler", "static graph", "bucket views", "static graph, bucket views", "unused search"}


def check_features(ranks: list[dict[str, Any]], names: set[str]) -> None:
    check_training(ranks, names)
    for found in ranks:
        assert found["scaler"]["scales"] > 3
        for same in names & SAME_BITS:
            assert found[same]["hash"] == found["plain"]["hash"], same
        for name in names & {"clipping", "all"}:
            assert found[name]["norms"] == ranks[0][name]["norms"]
            assert max(found[name]["norms"]) > 0.5
        assert found["all"]["steps"] == 40, "no_sync backwards are not synchronized"


def test_features_of_torch_compose(of_two: list[dict[str, Any]]) -> None:
    check_features([rank["features"] for rank in of_two], set(COMBINED))


@pytest.mark.ci
@pytest.mark.timeout(240)
def test_each_feature_of_torch_composes() -> None:
    ranks = results(launch("composition.features", 2, timeout=220, names=list(FEATURES)))
    check_features(ranks, set(FEATURES))
    for found in ranks:
        assert found["scaler, not told"]["hash"] != found["plain"]["hash"], "the test can see the difference"
        assert found["accumulation"]["steps"] == 25, "no_sync backwards are not synchronized"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler, found no g++")
@pytest.mark.timeout(400)
def test_models_compiled_by_inductor_train() -> None:
    check_training(
        results(launch("composition.inductor", 2, timeout=380)), {"plain", "compiled inside", "compiled outside"}
    )


def test_several_modules_in_one_backward(of_two: list[dict[str, Any]]) -> None:
    ranks = [rank["modules"] for rank in of_two]
    for found in ranks:
        assert found["hash"] == ranks[0]["hash"]
        assert found["last"] < 0.9 * found["first"]
        assert found["steps"] == [40, 40, 40]
        assert found["after"] == [40, 41, 40], "one is detached, the other goes on"


def test_a_hook_of_the_users_own_may_call_gradwire(of_two: list[dict[str, Any]]) -> None:
    """The slot stays the user's."""
    for found in (rank["own_hook"] for rank in of_two):
        with_gradwire, detached = found["deviations"][:2], found["deviations"][2]
        assert all(0 < deviation < 0.01 for deviation in with_gradwire), "fp16 rounds"
        assert detached < 1e-6, "after detach the hook goes on, with all-reduce"
        assert found["came_out"] >= 3
        assert found["steps"] == 1
        assert "attach with register=False and call handle.hook(state, bucket)" in found["refused"]["own hook"]
        assert "Attach without register=False" in found["refused"]["gradwire's"]


CASES = [
    ("threelc", "scatter_reduce", True),
    ("onebit", "ring", True),
    ("int8shared", "ring", True),
    ("topk", "allgather", False),
    ("powersgd", "ring", True),
]


@pytest.mark.ci
@pytest.mark.timeout(240)
def test_uneven_inputs() -> None:
    """The divisor keeps its meaning, who has left emits no residual, and nothing is lost."""
    ranks = results(launch("composition.join", 3, timeout=220, cases=CASES))
    for rank, found in enumerate(ranks):
        steps = range(1 + 2 * rank)
        active = [3 if step < 1 else 2 if step < 3 else 1 for step in steps]
        for attached in (False, True, None):
            assert found["divisor"][f"{attached} True"] == pytest.approx([2.0 * count for count in active])
            assert found["divisor"][f"{attached} False"] == pytest.approx([6.0 for _ in active])
        assert len(found["training"]) == len(CASES)
        for case, training in found["training"].items():
            assert training["hash"] == ranks[0]["training"][case]["hash"], case
            assert training["after"] == ranks[0]["training"][case]["after"], case
            assert training["steps"] == 10
            assert training["kept"] or rank == 2, case
    for case, training in ranks[2]["training"].items():
        # int8shared rounds without feedback: an eighth of a level at most is off on average, but nothing is kept back.
        assert training["error"] < (1e-5 if not case.startswith("int8shared") else 0.01), case


def test_a_rank_that_has_left_settles_each_optimizer_alone() -> None:
    assert results(launch("composition.join_with_two_optimizers", 2))[1]["error"] < 1e-5


@pytest.mark.ci
def test_a_lost_rank_is_named_where_torch_gives_no_end_of_backward() -> None:
    outcome = launch("composition.lost", 3)[0]
    assert outcome.exit_code == 0, outcome.output
    assert outcome.result == {
        "first static backward": {"type": "PeerLostError", "rank": 1},
        "joined": {"type": "PeerLostError", "rank": 1},  # of its group, where it is rank 2 of the job
    }


def test_unused_parameters_keep_their_residual_however_gradients_are_cleared(of_two: list[dict[str, Any]]) -> None:
    """Where `zero_grad` leaves zeros, or is not called, or gradients are views of the bucket."""
    keys = [f"{clears} {as_view}" for clears in ("to none", "to zero", "in even steps") for as_view in (True, False)]
    other, owner = (rank["unused"] for rank in of_two)
    assert owner == {key: [None] * 6 for key in keys}  # of the one compressed tensor of the branch
    assert other == {key: [True] * 6 for key in keys}


def test_nothing_is_lost_if_backwards_of_one_step_use_branches_in_turns(of_two: list[dict[str, Any]]) -> None:
    """DDP discards the mean of a branch that no rank has used, unless gradients are views of buckets."""
    for key in of_two[0]["branches_in_turns"]:
        produced, applied, left = np.sum([rank["branches_in_turns"][key] for rank in of_two], axis=0)
        assert np.abs(left).max() > 0.1, "nothing was left out"
        np.testing.assert_allclose(applied + left, produced, rtol=1e-4, atol=1e-4, err_msg=key)


@pytest.mark.ci
def test_other_default_types_and_devices_change_no_bit() -> None:
    for rank in results(launch("defaults.changes_them", 2)):
        assert all(len(set(hashes)) == 1 for hashes in rank.values()), rank
