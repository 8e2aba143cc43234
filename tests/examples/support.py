"""Run examples as users do, with as many processes as asked for, and compare what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.integration.launch import ROOT, free_port

EXAMPLES = ROOT / "examples"
MOST_LINES = 80
SHORT, LONG = 2, 3  # epochs


def env(**more: str) -> dict[str, str]:
    """The environment of an example's process."""
    return os.environ | {
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path), **more
    }  # fmt: skip


def command(example: str, folder: Path, *arguments: str) -> list[str]:
    """Run an example in this interpreter, and write a hash of the parameters to a folder."""
    return ["-m", "tests.examples.run_example", str(EXAMPLES / f"{example}.py"), str(folder), *arguments]


def run(example: str, folder: Path, epochs: int, num_processes: int = 2) -> tuple[list[str], str]:
    """Train until so many epochs are done. Returns a hash of the parameters by rank, and what was printed."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.hash"):
        old.unlink()
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={num_processes}", f"--master-port={free_port()}"]
    arguments = command(example, folder, f"--epochs={epochs}", f"--folder={folder}")
    done = subprocess.run(
        [sys.executable, *(launcher if num_processes > 1 else ()), *arguments],
        cwd=ROOT, env=env(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return [(folder / f"{rank}.hash").read_text() for rank in range(num_processes)], said


def resumes_bit_for_bit(example: str, folder: Path, checkpoint: str, keys: list[str], compressor: str) -> None:
    """Train in one go and in two: the same replicas and residuals.

    Args:
        example: Name of the example.
        folder: Folder for its checkpoints.
        checkpoint: Pattern of its checkpoint with the residuals of all ranks.
        keys: Where they are in it.
        compressor: Name that the example's report must show.
    """
    unbroken, said = run(example, folder / "unbroken", LONG)
    assert len(set(unbroken)) == 1, "the replicas differ"
    assert compressor in said, "nothing was compressed"

    short, _ = run(example, folder / "broken", SHORT)
    assert short[0] != unbroken[0]
    held = residuals(folder / "broken", checkpoint, keys)
    assert [state["rank"] for state in held] == [0, 1]
    assert all(total([state], "").abs().sum() > 0 for state in held), "a rank holds nothing"
    resumed, _ = run(example, folder / "broken", LONG)
    assert resumed == unbroken
    found, expected = (residuals(folder / each, checkpoint, keys) for each in ("broken", "unbroken"))
    assert_same(found, expected)


def residuals(folder: Path, checkpoint: str, keys: list[str]) -> Any:
    """The states of all ranks in the newest checkpoint."""
    newest = max(folder.glob(checkpoint), key=lambda path: path.stat().st_mtime)
    found = torch.load(newest, weights_only=not checkpoint.endswith(".ckpt"))  # Lightning's hold more than tensors
    for key in keys:
        found = found[key]
    return found["states"]


def total(states: list[Any], name: str) -> torch.Tensor:
    """The sum of what states hold, in both roles, of the parameters whose names end with `name`."""
    sums = torch.zeros(128 * 256, dtype=torch.float64)
    for state in states:
        for role in ("local", "aggregate"):
            for parameter, pieces in state["residuals"][role].items():
                for offset, values in pieces.items() if parameter.endswith(name) else ():
                    sums[int(offset) : int(offset) + values.numel()] += values.abs() if not name else values
    return sums


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
