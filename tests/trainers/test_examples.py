"""The examples of frameworks, with the real packages and two processes: they end well, and resume bit for bit."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from gradwire.ddp.observed import SCALARS
from tests.examples.support import residuals, resumes_bit_for_bit, run, total

# The framework's own checkpoint with the residuals of all ranks, and where they are in it.
FILES = {
    "train_accelerate": ("state/custom_checkpoint_0.pkl", []),
    "train_trainer": ("checkpoint-*/gradwire.pt", []),
    "train_lightning": ("last.ckpt", ["callbacks", "GradwireCallback"]),
}

pytestmark = [pytest.mark.ci, pytest.mark.frameworks, pytest.mark.timeout(400)]


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
    resumes_bit_for_bit(example, tmp_path, *FILES[example], "threelc")
    if example in ("train_trainer", "train_lightning"):
        assert {name for name in logged(example, tmp_path / "unbroken") if "gradwire" in name} == set(SCALARS)


@pytest.mark.parametrize("example", sorted(FILES))
def test_one_process_does_without_and_keeps_what_two_have_held(example: str, tmp_path: Path) -> None:
    run(example, tmp_path, 1)
    two = residuals(tmp_path, *FILES[example])
    _, said = run(example, tmp_path, 2, num_processes=1)
    (one,) = residuals(tmp_path, *FILES[example])
    sums = [total(states, "0.weight") for states in (two, [one])]
    assert sums[0].any()
    assert torch.allclose(sums[0], sums[1], rtol=0, atol=1e-6 * float(sums[0].abs().max()))
    assert "threelc" not in said
