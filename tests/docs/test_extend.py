"""docs/extend.md, followed to the letter: its files, its snippets, its commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE.read_text(), re.DOTALL)
FILES = ("blockwise.py", "train.py", "alone.py", "clipped.py", "companded.py", "oracle.py")
COMMANDS = [line for language, block in BLOCKS if language in ("sh", "text") for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's Python blocks as files, by the names that the page gives them, or by what they show."""
    folder = tmp_path_factory.mktemp("extend")
    sources = [block for language, block in BLOCKS if language == "python"]
    assert len(sources) == len(FILES)
    for name, source in zip(FILES, sources, strict=True):
        (folder / name).write_text(source)
    return folder


def run(folder: Path, *command: str) -> str:
    """Run a command of the page with this interpreter; what it printed."""
    programs = {
        "gradwire": ["-m", "gradwire.cli"], "python": [], "torchrun": ["-m", "torch.distributed.run"]
    }  # fmt: skip
    arguments = [sys.executable, *programs[command[0]], *command[1:]]
    env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(arguments, cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# `make test` runs the command with options, `make ci` all of them.
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(line, marks=() if "--option" in line else pytest.mark.ci)
        for line in COMMANDS
        if line.startswith("gradwire ")
    ],
)
def test_commands(folder: Path, command: str) -> None:
    assert run(folder, *shlex.split(command))


@pytest.mark.ci
def test_training_on_two_ranks(folder: Path) -> None:
    (command,) = (line for line in COMMANDS if line.startswith("torchrun"))
    said = run(folder, *shlex.split(command))
    assert "blockwise(bits=4, block=256) scatter_reduce" in said
    assert float(re.findall(r"^loss ([\d.]+)$", said, re.MULTILINE)[0]) < 1.2


def test_snippets(folder: Path) -> None:
    num_bytes, *_ = run(folder, "python", "alone.py").split()
    assert int(num_bytes) < 1200
    assert run(folder, "python", "clipped.py").strip() in COMMANDS, "the page shows another message"
    said = run(folder, "python", "oracle.py")
    assert "cast(%9, dtype=uint2)" in said
    assert "'q': array([1., 0., 3., 2.]" in said


def test_tables_name_everything_that_the_language_exports() -> None:
    import gradwire.lang

    text = PAGE.read_text()
    internal = {"TraceError", "operators", "trace"}
    missing = [name for name in gradwire.lang.__all__ if name not in internal and not re.search(rf"\b{name}\b", text)]
    assert not missing
