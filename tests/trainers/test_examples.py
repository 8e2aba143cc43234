"""The examples, with the real packages from PyPI and two processes: they end well, and resume bit for bit."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.ddp.observed import SCALARS
from tests.integration.launch import ROOT, free_port

EXAMPLES = ROOT / "examples"
# The framework's own checkpoint with the residuals of all ranks, and where they are in it.
FILES = {
    "train_ddp": ("checkpoint.pt", ["gradwire"]),
    "train_accelerate": ("state/custom_checkpoint_0.pkl", []),
    "train_trainer": ("checkpoint-*/gradwire.pt", []),
    "train_lightning": ("last.ckpt", ["callbacks", "GradwireCallback"]),
}
SHORT, LONG = 2, 3  # epochs

pytestmark = [pytest.mark.ci, pytest.mark.frameworks, pytest.mark.timeout(400)]


def run(example: str, folder: Path, epochs: int, num_processes: int = 2) -> tuple[list[str], str]:
    """Train until `epochs` are done. Returns a hash of the parameters by rank, and what was printed."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.hash"):
        old.unlink()
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={num_processes}", f"--master-port={free_port()}"]
    command = [
        *(sys.executable, *(launcher if num_processes > 1 else ()), "-m", "tests.trainers.run_example"),
        *(str(EXAMPLES / f"{example}.py"), str(folder), f"--epochs={epochs}", f"--folder={folder}"),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return [(folder / f"{rank}.hash").read_text() for rank in range(num_processes)], said


def residuals(example: str, folder: Path) -> Any:
    """The states of all ranks in the example's checkpoint."""
    pattern, keys = FILES[example]
    newest = max(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    found = torch.load(newest, weights_only=example != "train_lightning")
    for key in keys:
        found = found[key]
    return found["states"]


def logged(example: str, folder: Path) -> set[str]:
    """The names of all numbers that the framework has logged."""
    if example == "train_trainer":
        newest = max(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
        return {name for entry in json.loads(newest.read_text())["log_history"] for name in entry}
    (path,) = folder.glob("logs/version_0/metrics.csv")
    with path.open(newline="") as file:
        return set(next(csv.reader(file)))


@pytest.mark.parametrize("example", sorted(FILES))
def test_two_processes_are_equal_and_resume_bit_for_bit(example: str, tmp_path: Path) -> None:
    unbroken, said = run(example, tmp_path / "unbroken", LONG)
    assert len(set(unbroken)) == 1, "the replicas differ"
    assert "threelc" in said, "nothing was compressed"
    if example in ("train_trainer", "train_lightning"):
        assert {name for name in logged(example, tmp_path / "unbroken") if "gradwire" in name} == set(SCALARS)

    short, _ = run(example, tmp_path / "broken", SHORT)
    assert short[0] != unbroken[0]
    held = residuals(example, tmp_path / "broken")
    assert [state["rank"] for state in held] == [0, 1]
    assert all(total([state], "").abs().sum() > 0 for state in held), "a rank holds nothing"
    resumed, _ = run(example, tmp_path / "broken", LONG)
    assert resumed == unbroken
    assert_same(residuals(example, tmp_path / "broken"), residuals(example, tmp_path / "unbroken"))


def assert_same(found: Any, expected: Any) -> None:
    """Compare states bit for bit."""
    assert type(found) is type(expected)
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert_same(value, expected[key])
    elif isinstance(found, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("example", sorted(FILES.keys() - {"train_ddp"}))
def test_one_process_does_without_and_keeps_what_two_have_held(example: str, tmp_path: Path) -> None:
    run(example, tmp_path, 1)
    two = residuals(example, tmp_path)
    _, said = run(example, tmp_path, 2, num_processes=1)
    (one,) = residuals(example, tmp_path)
    sums = [total(states, "0.weight") for states in (two, [one])]
    assert sums[0].any()
    assert torch.allclose(sums[0], sums[1], rtol=0, atol=1e-6 * float(sums[0].abs().max()))
    assert "threelc" not in said


def total(states: list[Any], name: str) -> torch.Tensor:
    """The sum of what states hold, in both roles, of the parameters whose names end with `name`."""
    sums = torch.zeros(128 * 256, dtype=torch.float64)
    for state in states:
        for role in ("local", "aggregate"):
            for parameter, pieces in state["residuals"][role].items():
                for offset, values in pieces.items() if parameter.endswith(name) else ():
                    sums[int(offset) : int(offset) + values.numel()] += values.abs() if not name else values
    return sums


@pytest.mark.parametrize("example", sorted(FILES))
def test_an_example_is_short(example: str) -> None:
    assert len((EXAMPLES / f"{example}.py").read_text().splitlines()) < 80
