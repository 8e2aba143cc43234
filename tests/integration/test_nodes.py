"""Two nodes, each with a torchrun of its own: ranks find out who shares theirs, and only payloads pass between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradwire.lab import Lab
from tests.integration.launch import ROOT, free_port


def torchrun(job: str, folder: Path, node: int, nodes: int, ranks: int, master: str, port: int) -> list[str]:
    """The command of a node."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={node}"),
        *(f"--nproc-per-node={ranks}", f"--master-addr={master}", f"--master-port={port}", "--monitor-interval=0.1"),
        *("-m", "tests.integration.jobs.nodes", job, str(folder)),
    ]


def read(folder: Path, world_size: int) -> list[Any]:
    """Results by rank."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def launch(ranks_of_nodes: list[int], job: str, folder: Path) -> list[Any]:
    """Run a job under a torchrun a node, on this machine; its results by rank."""
    port, num_nodes = free_port(), len(ranks_of_nodes)
    env = os.environ | {"OMP_NUM_THREADS": "1", "GRADWIRE_DUMP_DIR": str(folder)}
    agents = []
    for node, num_ranks in enumerate(ranks_of_nodes):
        command = torchrun(job, folder, node, num_nodes, num_ranks, "127.0.0.1", port)
        agents.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        outputs = [agent.communicate(timeout=100)[0].decode() for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0] * num_nodes, "\n".join(outputs)
    return read(folder, sum(ranks_of_nodes))


@pytest.mark.ci
def test_two_nodes_find_each_other(tmp_path: Path) -> None:
    ranks = launch([2, 1], "trains", tmp_path)
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


@pytest.mark.ci
@pytest.mark.root
@pytest.mark.timeout(240)
def test_auto_sums_within_nodes_before_a_slow_link(tmp_path: Path) -> None:
    """Two hosts of two ranks: with a sum for each host, half as many bytes pass between them."""
    with Lab(2, "10mbit") as lab:
        master = lab.environment(0)["MASTER_ADDR"]
        env = {"OMP_NUM_THREADS": "1", "GRADWIRE_DUMP_DIR": str(tmp_path)}
        lab.run(
            lambda host: torchrun("decides", tmp_path, host, 2, 2, master, 29511), cwd=ROOT, env=env, timeout=220
        ).check()
    ranks = read(tmp_path, 4)
    assert ranks == ranks[:1] * 4
    assert ranks[0]["ranks_per_node"] == 2
    assert "threelc" in ranks[0]["chosen"]
    assert ["threelc", "hierarchical"] in ranks[0]["planned"], ranks[0]
