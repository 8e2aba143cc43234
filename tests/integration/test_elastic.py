"""Restarts under a real torchrun (D4), and training that goes on with another number of ranks (D5)."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs.elastic import SAVE_EVERY
from tests.integration.launch import ROOT, free_port, launch, results


def torchrun(world_size: int, max_restarts: int, folder: Path, **parameters: Any) -> list[Any]:
    """Run `jobs.elastic` under torchrun; its results by rank."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world_size}", "--monitor-interval=0.1"),
        *(f"--max-restarts={max_restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"),
        *("--rdzv-id=gradwire", "--local-addr=127.0.0.1", "-m", "tests.integration.jobs.elastic"),
        json.dumps({"folder": str(folder), **parameters}),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GRADWIRE_DUMP_DIR": str(folder)}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.parametrize(
    ("method", "strategy", "world_size"),
    [("threelc", "scatter_reduce", 2), pytest.param("onebit", "ring", 3, marks=pytest.mark.slow)],
)
def test_a_killed_rank_restarts_and_ends_with_the_same_bits(
    tmp_path: Path, method: str, strategy: str, world_size: int
) -> None:
    """One rank dies within a backward; after the restart, the other when some have saved a step and it has not."""
    common = {"method": method, "strategy": strategy, "steps": 20}
    (tmp_path / "unbroken").mkdir()
    unbroken = results(launch("elastic.train", world_size, **common, folder=str(tmp_path / "unbroken"), deaths={}))
    deaths = {"0": [1, 7, "backward"], "1": [0, 14, "save"]}
    (tmp_path / "broken").mkdir()
    broken = torchrun(world_size, 3, tmp_path / "broken", **common, deaths=deaths)
    assert {rank["hash"] for rank in broken} == {unbroken[0]["hash"]}
    assert {rank["start"] for rank in broken} == {2 * SAVE_EVERY}, "the second death was after step 14 and before 15"


def test_training_goes_on_with_three_ranks_and_with_four_again(tmp_path: Path) -> None:
    cases = [("threelc", "scatter_reduce"), ("onebit", "ring"), ("topk", "allgather")]
    sizes = [4, 3, 4]
    ranks = results(launch("elastic.resize", 4, folder=str(tmp_path), sizes=sizes, cases=cases))
    for case, phases in ranks[0].items():
        for number, size in enumerate(sizes):
            # The fourth rank has no second phase.
            same = [rank[case][number if len(rank[case]) == 3 else number // 2] for rank in ranks[:size]]
            assert len({found["hash"] for found in same}) == 1, case
            assert phases[number]["step"] == 40 * (number + 1), case
        assert len(ranks[3][case]) == 2
        for before, after in itertools.pairwise(phases):
            assert after["losses"][0] < 1.3 * before["losses"][1], case
            assert after["size"] > 0
            assert after["deviation"] <= 1e-6 * after["size"], case
        assert phases[2]["losses"][1] < 0.5 * phases[0]["losses"][0], case
