"""Scalars and logs of jobs with several ranks, and blocks that end by an exception on one of them."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from gradwire.ddp.observed import AUTO_SCALARS, SCALARS
from tests.integration.launch import launch, results


@pytest.mark.parametrize(("method", "steps"), [("threelc", 22), pytest.param("auto", 2500, marks=pytest.mark.ci)])
@pytest.mark.timeout(400)  # auto compiles codecs
def test_rank_0_logs_intervals_that_add_up_to_the_report(tmp_path: Path, method: str, steps: int) -> None:
    outcomes = launch("observed.logs", 2, folder=str(tmp_path), method=method, steps=steps)
    first, second = results(outcomes)
    assert first["steps"] == second["steps"] == steps
    assert second["seen"] == [], "only rank 0 writes"
    assert [row["gradwire/step"] for row in first["seen"]] == [*range(5, steps, 5), steps]
    lengths = [5] * (len(first["seen"]) - 1) + [steps - 5 * (len(first["seen"]) - 1)]
    sent = sum(row["gradwire/sent_bytes"] * length for row, length in zip(first["seen"], lengths, strict=True))
    assert math.isclose(sent, first["sent"])
    assert first["seen"][-1]["gradwire/total_sent_bytes"] == first["sent"]
    assert all(row["gradwire/step_ms"] > row["gradwire/wait_ms"] >= 0 for row in first["seen"])
    assert "the tracker is away" in outcomes[0].output
    assert outcomes[0].output.count("This log ends.") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.rank0.csv", "all.rank1.csv"]
    with (tmp_path / "all.rank1.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*SCALARS, *(AUTO_SCALARS if method == "auto" else ())]
    if method == "auto":
        assert first["seen"][-1]["gradwire/auto/decisions"] >= 1
        assert first["seen"][-1]["gradwire/auto/step_ms"] > 0
    else:
        assert first["seen"][-1]["gradwire/ratio"] > 8
        assert first["seen"][-1]["gradwire/residual_norm"] > 0
        assert first["wait"] > 0


def test_an_exception_in_the_block_of_one_rank_ends_the_others_at_once_by_name() -> None:
    first, second = results(launch("observed.raises_in_a_block", 2))
    assert first["error"][1] == 1 and first["error"][0].startswith("Peer")
    assert second["error"] == ["ZeroDivisionError", None]
    assert first["seconds"] < 20, "no timeout was waited for"
    assert all("detached" in found["handle"] for found in (first, second))
