"""A compressor of the user's own on real DDP jobs: every strategy, residuals, and state that resumes bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.launch import launch, results

STRATEGIES = ["allgather", "ring", "scatter_reduce"]


@pytest.mark.ci
def test_a_users_compressor_trains_and_resumes_under_every_strategy(tmp_path: Path) -> None:
    common = {"strategies": STRATEGIES, "steps": 60, "save_at": 40, "folder": str(tmp_path)}
    unbroken = results(launch("extend.train", 2, **common))
    resumed = results(launch("extend.train", 2, **common, resume=True))
    for strategy in STRATEGIES:
        first, *others = [rank[strategy] for rank in (*unbroken, *resumed)]
        assert all(other["hash"] == first["hash"] for other in others), strategy
        assert sum(first["losses"][-10:]) < 0.8 * sum(first["losses"][:10]), strategy
        assert first["ratio"] > 8
        assert all(rank[strategy]["residual"] > 0 for rank in unbroken)
