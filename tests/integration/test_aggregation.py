"""Training through `gradwire serve --aggregate`: processes, sockets, and a server that is killed on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.integration.jobs.aggregation import TIMEOUT
from tests.integration.launch import ROOT, Outcome, free_port, launch, results


@contextmanager
def serving(port: int, workers: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A server process, once it says that it serves."""
    command = [sys.executable, "-m", "gradwire.cli", "serve", "--aggregate", "--workers", str(workers)]
    with subprocess.Popen(
        [*command, "--port", str(port), *options], cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert "Serving sums" in process.stdout.readline()
            yield process
        finally:
            process.kill()


def wait_for(path: Path, job: Future[list[Outcome]]) -> None:
    deadline = time.monotonic() + 90
    while not path.exists() and not job.done():
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.01)
    assert path.exists(), job.result()


@pytest.mark.ci
@pytest.mark.parametrize("options", [(), ("--udp",)], ids=["tcp", "udp"])
def test_four_ranks_train_to_the_same_bits_as_between_themselves_over_a_restart(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    port = free_port()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        first = stack.enter_context(serving(port, 4, *options))
        job = pool.submit(launch, "aggregation.train", 4, server=f"127.0.0.1:{port}", folder=str(tmp_path))
        wait_for(tmp_path / "under-way", job)
        first.send_signal(signal.SIGKILL)
        first.wait()
        second = stack.enter_context(serving(port, 4, *options))
        (tmp_path / "restarted").touch()
        ranks = results(job.result())
        said, _ = second.communicate(timeout=30)
    assert second.returncode == 0 and "All workers have finished." in said
    for rank in ranks:
        assert rank["through"] == rank["between"] == ranks[0]["between"]
        assert rank["report"]["syncs"] == 20 and rank["report"]["late_elements"] == 0
        assert rank["report"]["sent_bytes"] / 20 < 96 * 96 / 2 + 1000, "half a byte an element, norms and headers"


@pytest.mark.ci
def test_a_server_that_stays_away_ends_the_job_on_all_ranks(tmp_path: Path) -> None:
    port = free_port()
    with serving(port, 3) as server, ThreadPoolExecutor(1) as pool:
        job = pool.submit(launch, "aggregation.lose_the_server", 3, server=f"127.0.0.1:{port}", folder=str(tmp_path))
        wait_for(tmp_path / "under-way", job)
        server.send_signal(signal.SIGKILL)
        found = results(job.result())
    for outcome in found:
        assert outcome["type"] in ("PeerTimeoutError", "PeerFailedError")
        assert "The aggregation server at" in outcome["message"], "whoever it hears it from"
        assert "Look at its log." in outcome["message"]
        assert outcome["seconds"] < 2 * TIMEOUT
