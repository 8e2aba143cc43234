"""Real processes, real sockets: run a job on every rank of a group on loopback and collect what each returns."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass
class Outcome:
    """How one rank ended: its job's result, its exit code (negative: the signal), and what it printed."""

    result: Any
    exit_code: int | None
    output: str


def launch(
    job: str, world_size: int, *, timeout: float = 100.0, doomed: tuple[int, ...] = (), **parameters: Any
) -> list[Outcome]:
    """Run `tests.integration.jobs.<job>` on `world_size` ranks; return by rank.

    Args:
        job: ``"module.function"``; it is called with (rank, world_size, **parameters) and returns JSON.
        timeout: seconds after which ranks still running are killed.
        doomed: ranks that are not waited for: killed once the others have ended.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _start(job, rank, world_size, port, parameters, Path(folder) / str(rank)) for rank in range(world_size)
        ]
        deadline = time.monotonic() + timeout
        try:
            order = sorted(range(world_size), key=lambda rank: rank in doomed)
            ends = {rank: 0.0 if rank in doomed else deadline for rank in order}
            found = {rank: _collect(processes[rank], Path(folder) / str(rank), ends[rank]) for rank in order}
            return [found[rank] for rank in range(world_size)]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGCONT)
                    process.kill()
                process.wait()


def free_port() -> int:
    """A port for rank 0's store, from below the range that the system hands out by itself.

    A port of that range could go to another connection in the seconds until rank 0 binds it.
    """
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("Expected a free port from 20000 to 29999, found none in 100 tries.")


def _start(job: str, rank: int, world_size: int, port: int, parameters: Any, path: Path) -> subprocess.Popen[bytes]:
    path.mkdir()
    env = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GRADWIRE_DUMP_DIR": str(path),
    }
    command = [sys.executable, "-m", "tests.integration.worker", job, json.dumps(parameters), str(path / "result.json")]
    with (path / "output").open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)


def _collect(process: subprocess.Popen[bytes], path: Path, deadline: float) -> Outcome:
    try:
        exit_code = process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        exit_code = None
    result = path / "result.json"
    value = json.loads(result.read_text()) if result.exists() else None
    return Outcome(value, exit_code, (path / "output").read_text(errors="replace"))


def results(outcomes: list[Outcome]) -> list[Any]:
    """The results of ranks that must all have ended well."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 0, f"rank {rank} ended with {outcome.exit_code}:\n{outcome.output}"
    return [outcome.result for outcome in outcomes]
