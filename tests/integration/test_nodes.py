"""Two nodes, each with a torchrun of its own: ranks find out who shares theirs, and only payloads pass between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launch import ROOT, free_port


def torchrun(ranks_of_nodes: list[int], job: str, folder: Path) -> list[Any]:
    """Run a job under a torchrun a node; its results by rank."""
    common = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(ranks_of_nodes)}"),
        *("--master-addr=127.0.0.1", f"--master-port={free_port()}", "--monitor-interval=0.1"),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GRADWIRE_DUMP_DIR": str(folder)}
    agents = []
    for node, num_ranks in enumerate(ranks_of_nodes):
        command = [*common, f"--node-rank={node}", f"--nproc-per-node={num_ranks}", "-m", job, str(folder)]
        agents.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        outputs = [agent.communicate(timeout=100)[0].decode() for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0] * len(agents), "\n".join(outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(sum(ranks_of_nodes))]


@pytest.mark.ci
def test_two_nodes_find_each_other(tmp_path: Path) -> None:
    ranks = torchrun([2, 1], "tests.integration.jobs.nodes", tmp_path)
    nodes = ["0", "0", "1"]
    assert [rank["node"] for rank in ranks] == nodes
    assert len({rank["hash"] for rank in ranks}) == 1
    sent = {"within": 0, "between": 0}
    for number, rank in enumerate(ranks):
        compressed = [method for method in rank["methods"] if method != "control message"]
        assert compressed and all("hierarchical" in method for method in compressed)
        assert sum(rank["losses"][-10:]) < 0.9 * sum(rank["losses"][:10])
        events = json.loads((tmp_path / f"trace.rank{number}.json").read_text())
        sends = [event["args"] for event in events if event.get("cat") == "send"]
        assert sum(args["bytes"] for args in sends) == rank["sent_bytes"]
        for args in sends:
            sent["within" if nodes[args["peer"]] == nodes[number] else "between"] += args["bytes"]
    assert 0 < sent["between"] < sent["within"] / 3
