"""The callback of Lightning, with the real package: when it logs, and with a compressor that sees the optimizer."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.trainers.support import on_two_ranks

pytestmark = [pytest.mark.ci, pytest.mark.frameworks, pytest.mark.timeout(400)]


@pytest.mark.parametrize("accumulate", [1, 8])
def test_scalars_are_logged_once_per_interval_of_steps_from_the_first_on(accumulate: int, tmp_path: Path) -> None:
    steps = 32 // accumulate  # per epoch
    on_two_ranks("lightning", folder=str(tmp_path), epochs=[2, 3], accumulate=accumulate, log_every=steps // 2)
    for version, epochs in enumerate(([0, 1], [2])):
        with (tmp_path / "logs" / f"version_{version}" / "metrics.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["gradwire/step"]]
        ends = [epoch * steps + each for epoch in epochs for each in (steps // 2, steps)]
        assert [int(row["step"]) for row in rows] == ends
        assert [float(row["gradwire/step"]) for row in rows] == ends
        assert all(float(row["gradwire/sent_bytes"]) > 0 for row in rows)


def test_gcomp_and_adam_step_by_the_closure_of_lightning(tmp_path: Path) -> None:
    """Backward runs within `optimizer.step` there, so moments move between the encode and the commit of residuals."""
    on_two_ranks("lightning", folder=str(tmp_path), epochs=[1, 2], accumulate=1, log_every=16, method="gcomp")
