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

from tests.integration.jobs.elastic import STEPS
from tests.integration.launch import ROOT, free_port, launch, results


def torchrun(world_size: int, max_restarts: int, folder: Path, **parameters: Any) -> list[Any]:
    """Run `jobs.elastic` under torchrun; its results by rank."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world_size}", "--monitor-interval=0.1"),
        *(f"--max-restarts={max_restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"),
        *("--rdzv-id=gradwire", "--local-addr=127.0.0.1", "-m", "tests.integration.jobs.elastic"),
        json.dumps({"folder": str(folder), **parameters}),
    ]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GRADWIRE_DUMP_DIR": str(folder),
        # Else restarted processes may find addresses of dead ones in the store (pytorch#135712): Gloo then refuses.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=220, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.parametrize(
    ("method", "strategy", "world_size", "deaths", "start"),
    [
        # Some have saved step 10, and rank 0 has not.
        ("threelc", "scatter_reduce", 2, {"0": [0, 9, "save"]}, 5),
        ("onebit", "ring", 3, {"0": [2, 7, "backward"], "1": [0, 14, "save"]}, 10),
    ],
)
@pytest.mark.ci
@pytest.mark.timeout(240)
def test_a_killed_rank_restarts_and_ends_with_the_same_bits(
    tmp_path: Path, method: str, strategy: str, world_size: int, deaths: dict[str, list[Any]], start: int
) -> None:
    ranks = torchrun(world_size, 3, tmp_path, method=method, strategy=strategy, steps=20, deaths=deaths)
    hashes = {result["hash"] for broken_and_unbroken in ranks for result in broken_and_unbroken}
    assert len(hashes) == 1
    assert [(broken["start"], unbroken["start"]) for broken, unbroken in ranks] == [(start, 0)] * world_size


@pytest.mark.ci
@pytest.mark.timeout(240)
def test_training_goes_on_with_three_ranks_and_with_four_again(tmp_path: Path) -> None:
    cases = [("threelc", "scatter_reduce"), ("onebit", "ring")]
    sizes = [4, 3, 4]
    ranks = results(launch("elastic.resize", 4, timeout=220, folder=str(tmp_path), sizes=sizes, cases=cases))
    for case, phases in ranks[0].items():
        for number, size in enumerate(sizes):
            # The fourth rank has no second phase.
            same = [rank[case][number if len(rank[case]) == 3 else number // 2] for rank in ranks[:size]]
            assert len({found["hash"] for found in same}) == 1, case
            assert phases[number]["step"] == STEPS * (number + 1), case
        assert len(ranks[3][case]) == 2
        for before, after in itertools.pairwise(phases):
            assert after["losses"][0] < 1.3 * before["losses"][1], case
            assert after["size"] > 0
            assert after["deviation"] <= 1e-6 * after["size"], case
        assert phases[2]["losses"][1] < 0.7 * phases[0]["losses"][0], case
