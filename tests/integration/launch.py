"""Real processes, real sockets: run a job on every rank of a group on loopback and collect what each returns."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO, Any

from tests.forks import forks
from tests.integration import worker

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0  # seconds, less than the timeout of a test, so that the latter can tell what the ranks printed
NUM_PORTS = 100  # of each process


@dataclass
class Outcome:
    """How one rank ended: its job's result, its exit code (negative: the signal), and what it printed."""

    result: Any
    exit_code: int | None
    output: str


def launch(
    job: str, world_size: int, *, timeout: float = PATIENCE, doomed: tuple[int, ...] = (), **parameters: Any
) -> list[Outcome]:
    """Run `tests.integration.jobs.<job>` on `world_size` ranks; return by rank.

    Args:
        job: ``"module.function"``; it is called with (rank, world_size, **parameters) and returns JSON.
        timeout: seconds after which ranks still running print their stacks and are killed.
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
                if process.is_alive():
                    assert process.pid is not None
                    os.kill(process.pid, signal.SIGCONT)
                    process.kill()
                process.join()


def free_port() -> int:
    """A port for rank 0's store, below the range that the system hands out by itself.

    Another port could go to another connection, or to another test, in the seconds until rank 0 binds it.
    """
    _, ports = _own_ports()
    for port in itertools.islice(ports, NUM_PORTS):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("Expected a free port among those of this process, found none.")


@functools.cache
def _own_ports() -> tuple[IO[bytes], Iterator[int]]:
    """The ports of this process, over and over, and the file whose lock keeps others from them until it ends."""
    folder = Path(tempfile.gettempdir()) / "gradwire-test-ports"
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):
        folder.chmod(0o777)  # for other users
    for first in range(20_000, 30_000, NUM_PORTS):
        try:
            file = (folder / str(first)).open("ab")
        except PermissionError:  # another user's
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        return file, itertools.cycle(range(first, first + NUM_PORTS))
    raise OSError("Expected at most 100 processes with tests at the same time.")


def _start(job: str, rank: int, world_size: int, port: int, parameters: Any, path: Path) -> ForkServerProcess:
    path.mkdir()
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GRADWIRE_DUMP_DIR": str(path),
    }
    arguments = (os.environ | env, path / "output", job, parameters, path / "result.json")
    process = forks.Process(target=worker.run, args=arguments)
    process.start()
    return process


def _collect(process: ForkServerProcess, path: Path, deadline: float) -> Outcome:
    process.join(max(0.1, deadline - time.monotonic()))
    exit_code = process.exitcode  # None while it runs
    if exit_code is None and deadline:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGUSR1)
        process.join(1.0)
    result = path / "result.json"
    value = json.loads(result.read_text()) if result.exists() else None
    return Outcome(value, exit_code, (path / "output").read_text(errors="replace"))


def results(outcomes: list[Outcome]) -> list[Any]:
    """The results of ranks that must all have ended well."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 0, f"rank {rank} ended with {outcome.exit_code}:\n{outcome.output}"
    return [outcome.result for outcome in outcomes]
