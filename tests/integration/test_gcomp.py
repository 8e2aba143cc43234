"""`gcomp` and `lossless` on real processes: lossless gives DDP's own bits, gcomp is close, in fewer bytes."""

from __future__ import annotations

import pytest

from tests.integration.launch import launch, results

METHODS = [["lossless", "ring"], ["lossless", "scatter_reduce"], ["gcomp", "ring"], ["gcomp", "scatter_reduce"]]


@pytest.mark.parametrize(
    ("optimizer", "in_closure"), [("sgd", False), pytest.param("adamw", False, marks=pytest.mark.ci), ("adamw", True)]
)
def test_two_ranks_train_as_without_compression(optimizer, in_closure) -> None:
    given = {"methods": METHODS, "optimizer": optimizer, "steps": 8, "in_closure": in_closure}
    first, second = results(launch("gcomp.train", 2, **given))
    for name, one in first.items():
        assert one["sum"] == second[name]["sum"], f"{name}: replicas differ"
        if name.startswith("lossless"):
            assert one["off"] == 0
        else:
            assert 0 < one["off"] < 1e-6
            assert one["ratio"] > first["lossless ring"]["ratio"] > 1.1


@pytest.mark.parametrize(("strategy", "in_closure"), [("ring", False), ("scatter_reduce", True)])
def test_if_ranks_differ_a_step_is_skipped_on_all_of_them_and_levels_are_sent_from_then_on(
    strategy, in_closure
) -> None:
    for outcome in launch("gcomp.mismatch", 2, strategy=strategy, in_closure=in_closure):
        assert outcome.result == {"changed": [False, True, True], "finite": [False, True, True], "common": False}
