"""The examples that need no framework, with two processes: they end well, replicas are equal, and they resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.support import EXAMPLES, LONG, MOST_LINES, command, env, resumes_bit_for_bit
from tests.integration.launch import ROOT, free_port

pytestmark = [pytest.mark.ci, pytest.mark.timeout(400)]

Process = subprocess.Popen[str]
LIMIT_SECONDS = 200


@pytest.mark.parametrize(("example", "compressor"), [("train_ddp", "threelc"), ("own_compressor", "blocks3")])
def test_two_processes_are_equal_and_resume_bit_for_bit(example: str, compressor: str, tmp_path: Path) -> None:
    resumes_bit_for_bit(example, tmp_path, "checkpoint.pt", ["gradwire"], compressor)


def test_the_own_compressor_keeps_the_contract() -> None:
    check = [sys.executable, "-m", "gradwire.cli", "check", f"{EXAMPLES / 'own_compressor.py'}:blocks3"]
    done = subprocess.run(check, cwd=ROOT, env=env(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def serve(folder: Path, port: int) -> Process:
    """The server of the example, as its first lines say."""
    options = ["--parameters", "--workers=2", f"--port={port}", f"--state={folder / 'state'}"]
    return start(["-m", "gradwire.cli", "serve", *options])


def start(arguments: list[str], **variables: str) -> Process:
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=env(**variables), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def train(folder: Path, *, kill: bool) -> list[str]:
    """Train with one server and two workers; return a hash of each worker's parameters.

    Args:
        folder: Folder for the server's state and the hashes.
        kill: Whether the server is killed after the first epoch and started again.
    """
    folder.mkdir()
    port = free_port()
    example = command("parameter_server", folder, f"--server=127.0.0.1:{port}", f"--epochs={LONG}")
    server = serve(folder, port)
    workers = [start(example, RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    try:
        if kill:
            lines = workers[0].stdout
            assert lines is not None
            assert any("epoch 0" in line for line in lines), "the worker ended before"
            os.kill(server.pid, signal.SIGKILL)
            server.communicate()
            server = serve(folder, port)
        said = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in (*workers, server)]
        assert [process.returncode for process in (*workers, server)] == [0, 0, 0], said
    finally:
        for process in (*workers, server):
            process.kill()
            process.communicate()
    return [(folder / f"{rank}.hash").read_text() for rank in range(2)]


def test_a_killed_parameter_server_comes_back_and_changes_nothing(tmp_path: Path) -> None:
    unbroken = train(tmp_path / "unbroken", kill=False)
    assert len(set(unbroken)) == 1, "the replicas differ"
    assert train(tmp_path / "broken", kill=True) == unbroken


@pytest.mark.parametrize("example", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_is_short(example: str) -> None:
    assert len((EXAMPLES / f"{example}.py").read_text().splitlines()) < MOST_LINES
