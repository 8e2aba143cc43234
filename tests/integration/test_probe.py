"""`gradwire probe` on real ranks: on loopback by torchrun, and in the lab, where compression must pay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradwire as gw
from gradwire.lab import Lab
from tests.integration.jobs.probe import BUSY
from tests.integration.launch import free_port, launch, results

MODULE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 128)
        self.spare = nn.Linear(8, 8)

    def forward(self, x, y):
        return {"loss": (self.second(torch.relu(self.first(x))) - y).square().mean()}

def job():
    torch.manual_seed(0)
    return Model(), {"x": torch.randn(4, 256), "y": torch.randn(4, 128)}
"""


@pytest.fixture
def module(tmp_path) -> Path:
    path = tmp_path / "my_job.py"
    path.write_text(MODULE)
    return path


@pytest.mark.ci
def test_torchrun_on_loopback(module):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command = ["-m", "gradwire.cli", "probe", "my_job:job", "--fidelity", "exact", "--seconds", "0.1"]
    done = subprocess.run(
        [*launcher, str(free_port()), *command, "--json", "found.json"],
        cwd=module.parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("my_job:job: 98,760 parameters in 6 tensors; 2 ranks, gloo; fidelity exact.") == 1
    assert "probe: timing DDP's fp16 hook\n" in done.stderr
    found = json.loads((module.parent / "found.json").read_text())
    dense, half = found["rows"][:2]
    assert dense["nbytes"] == 4 * 98_760 == 2 * half["nbytes"]
    assert not half["allowed"]
    # Which is faster here, is for the machine to say; what follows from the figures is not.
    assert found["sentence"] in done.stdout
    rows = {row["name"]: row for row in found["rows"] if row["allowed"]}
    if found["too_noisy"]:  # for the machine to say, too
        assert found["sentence"].startswith("Too noisy to advise") and found["advised"] is None
        return
    chosen = rows[found["advised"]]
    assert chosen["step"] * 0.95 <= max(found["compute"], min(row["step"] for row in rows.values()))
    assert found["sentence"].startswith("Do not compress" if chosen["kind"] == "fp32" else "Compress, with")
    twice = [line for line in done.stderr.splitlines() if line.startswith("probe: timing DDP's all-reduce")]
    assert len(twice) == 2 or chosen == dense


TWICE = "a step was shorter than one without communication: timing all of them again"


@pytest.mark.ci
def test_other_work_that_ends_costs_another_round() -> None:
    ranks = results(launch("probe.other_work", 2, times=2))
    for found, said in ranks:
        assert said.count(TWICE) == 1
        assert found["compute"] < BUSY
        assert not found["too_noisy"] and found["advised"]
        assert min(row["step"] / row["ideal"] for row in found["rows"]) > 0.95


@pytest.mark.ci
def test_other_work_that_goes_on_is_no_ground_for_advice() -> None:
    (found, said), _ = results(launch("probe.other_work", 2, times=3))
    assert said.count(TWICE) == 1
    assert found["too_noisy"] and found["advised"] is None
    assert found["sentence"].startswith("Too noisy to advise: a step by ")


@pytest.mark.ci
@pytest.mark.root
def test_on_a_slow_link_it_says_to_compress_and_saves_the_plan(module):
    options = ["--fidelity", "exact", "--compressors", "onebit", "--seconds", "0.3"]
    files = ["--json", "found.json", "--save-plan", "plan.json"]
    with Lab(2, "20mbit") as lab:
        result = lab.run(
            [sys.executable, "-m", "gradwire.cli", "probe", f"{module}:job", *options, *files],
            cwd=module.parent,
            timeout=100,
        ).check()
    words = result.hosts[0].stdout
    assert "Compress, with gradwire onebit: a step of" in words
    assert result.hosts[1].stdout == ""
    assert "probe: timing DDP's all-reduce in fp32 and gradwire onebit again" in result.hosts[0].stderr
    found = json.loads((module.parent / "found.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    dense, best = rows["DDP fp32"], rows["gradwire onebit"]
    assert dense["step"] > 8 * dense["nbytes"] / 20e6 * 0.8  # the bucket lets some pass at once
    assert dense["limit"] == "link"
    assert best["nbytes"] < dense["nbytes"] / 10
    assert found["compute"] <= best["ideal"] <= best["step"] * 1.5
    assert 1e7 < 8 * found["bytes_per_second"] < 3e7
    assert all(row["predicted"] > 0 for row in rows.values())
    table = gw.PlanTable.load(module.parent / "plan.json")
    specs = {"first.weight": "onebit", "second.weight": "onebit"}
    assert {row.name: row.spec for row in table.rows if row.spec != "none"} == specs
    assert table.plan().entry("spare.weight", gw.TensorSpec((8, 8), torch.float32)).batched
