"""Interpreters that end: who has left is missed where something is needed from it, then at once, and nowhere else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.jobs.exits import STEPS
from tests.integration.launch import ROOT, free_port


@pytest.mark.parametrize(
    ("how", "step", "kind", "said"),
    [
        ("exception", STEPS + 1, "PeerLostError", "Rank 1 has left the group"),
        pytest.param("kill", STEPS + 1, "PeerLostError", "has ended without a goodbye", marks=pytest.mark.ci),
        pytest.param(
            *("middle", STEPS, "PeerFailedError", "Rank 1 gave up: its interpreter exits in the middle of a step"),
            marks=pytest.mark.ci,
        ),
    ],
)
def test_a_step_outlives_who_has_left_after_it_and_the_next_one_names_it(
    tmp_path: Path, how: str, step: int, kind: str, said: str
) -> None:
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = os.environ | master | {"WORLD_SIZE": "2", "GRADWIRE_DUMP_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.integration.jobs.exits", how]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        stays, leaves = (
            stack.enter_context(subprocess.Popen(command, cwd=ROOT, env=env | {"RANK": str(rank)}, **pipes))
            for rank in range(2)
        )
        for process in (stays, leaves):
            stack.callback(process.kill)
        _, log = leaves.communicate(timeout=100)
        assert leaves.returncode == (-signal.SIGKILL if how == "kill" else 1), log
        out, log = stays.communicate("it is gone\n", timeout=100)
    assert stays.returncode == 0, log
    found = json.loads(out)
    assert (found["step"], found["type"], found["rank"]) == (step, kind, 1), found["message"]
    assert said in found["message"]
    assert found["seconds"] < 15, "no timeout of 30 s, no stall timeout"
