"""The faults of the norm watch's benchmark, and what it counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.micro.norm_watch import FAULTS, _most, flip, scaled, study, table


def test_a_fault_changes_the_norm_as_it_would_in_the_gradient() -> None:
    grad = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    for bit in (30, 26, 22):
        index = int(np.random.default_rng(bit).integers(grad.numel()))
        changed = grad.clone().view(-1)
        changed.view(torch.int32)[index] ^= 1 << bit
        expected = float(changed.double().square().sum() - grad.double().square().sum())
        assert flip(bit)(grad, np.random.default_rng(bit)) == pytest.approx(expected)
    quarter = grad.clone().view(-1)
    quarter[: 63 // 4] *= 8
    expected = float(quarter.double().square().sum() - grad.double().square().sum())
    assert scaled(8.0, 4)(grad, np.random.default_rng(0)) == pytest.approx(expected)
    assert scaled(-1.0, 1)(grad, np.random.default_rng(0)) == 0


def test_a_flip_that_leaves_no_number_is_said_to() -> None:
    assert not np.isfinite(flip(30)(torch.ones(1), np.random.default_rng(0)))


def test_large_faults_are_seen_and_sign_changes_are_not() -> None:
    rows = list(study("digits", 4, 40, 1))
    faults = [row for row in rows if row["metric"] == "detected" and row["samples"]]
    found = {(row["method"], row["interval"]): row["value"] / row["samples"] for row in faults}
    assert found["tensor x 2^8", 1] > 0.9 and found["tensor x -1", 1] < 0.1
    assert {row["method"] for row in rows if row["metric"] == "detected"} == set(FAULTS)
    (every, *_), judged = [row for row in rows if row["metric"] == "false alarms"], 24 * 4 * 8
    assert every["interval"] == 1 and every["samples"] == judged and every["value"] < judged / 10
    assert "tensor x 2^8" in table(rows)


@pytest.mark.parametrize(("count", "most"), [(0, 3.0), (1, 4.74), (10, 16.96)])
def test_the_upper_end_of_a_count_is_that_of_the_tables(count: int, most: float) -> None:
    assert _most(count) == pytest.approx(most, rel=0.02)
