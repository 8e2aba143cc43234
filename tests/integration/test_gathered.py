"""One document with the states of all ranks: by a file, and by torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.launch import launch, results


def test_jobs_resume_bit_for_bit_from_one_file_and_from_a_distributed_checkpoint(tmp_path: Path) -> None:
    ranks = results(launch("gathered.resume", 2, folder=str(tmp_path)))
    assert len({each for rank in ranks for each in rank["hashes"]}) == 1
    assert [rank["ranks"] for rank in ranks] == [[0, 1], []], "only rank 0 gets the document with rank0_only"
    assert all(rank["roles"] == ["aggregate", "local", "states", "version"] for rank in ranks)


@pytest.mark.ci
def test_fewer_ranks_hold_what_all_have_held(tmp_path: Path) -> None:
    first, second, third = results(launch("gathered.fewer", 3, folder=str(tmp_path)))
    assert first["hash"] == second["hash"]
    assert not third
    for found in (first, second):
        assert found["names"][0] == found["names"][1]
        assert found["size"] > 0
        assert found["deviation"] <= 1e-6 * found["size"]


def test_a_rank_may_be_late_to_gather() -> None:
    assert results(launch("gathered.late", 2)) == [["states", "version"]] * 2


def test_a_rank_that_does_not_gather_is_an_error_in_time() -> None:
    said, _ = results(launch("gathered.absent", 2))
    assert "rank 1" in said.lower() and "stall_timeout" in said
