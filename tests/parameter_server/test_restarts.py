"""Parameter servers and workers as real processes: killed, frozen, returning."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradwire.core.errors import StateError
from gradwire.parameter_server.process import ParameterServer, ParameterServerOptions
from tests.parameter_server.processes import serve, work
from tests.server_processes import Process


class Job:
    """Processes of one job, ended whatever happens."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.servers = ""

    def start(self, target: Any, *arguments: Any) -> Process:
        self.processes.append(Process(target, *arguments))
        return self.processes[-1]

    def serve(
        self, workers: int, port: int = 0, state: Any = None, timeout: float = 10.0, patience: float = 30.0
    ) -> Process:
        server = self.start(serve, workers, port, None if state is None else str(state), timeout, patience)
        self.servers = f"127.0.0.1:{server.hear('port')}"
        return server

    def work(
        self, worker: int, workers: int, steps: int, timeout: float = 30.0, backups: int = 0, staleness: int = 0
    ) -> Process:
        return self.start(work, worker, workers, self.servers, steps, timeout, backups, staleness)


@pytest.fixture
def job() -> Iterator[Job]:
    found = Job()
    yield found
    for process in found.processes:
        process.end()


def weights(workers: list[Process]) -> list[dict[str, np.ndarray]]:
    return [worker.hear("weights") for worker in workers]


def assert_same(found: list[dict[str, np.ndarray]]) -> None:
    for other in found[1:]:
        for name, values in found[0].items():
            np.testing.assert_array_equal(other[name], values, err_msg=name)


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_a_server_that_is_killed_or_stopped_goes_on_where_it_was(job: Job, tmp_path) -> None:
    """The weights in the end are those of a run that nothing has happened to, bit for bit.

    A second server that is started on its state is refused, and has no part in them.
    """
    job.serve(2, state=tmp_path / "unbroken")
    unbroken = weights([job.work(worker, 2, 14) for worker in range(2)])
    assert_same(unbroken)

    server = job.serve(2, state=tmp_path / "broken", patience=100)
    port = int(job.servers.rpartition(":")[2])
    workers = [job.work(worker, 2, 14, timeout=100) for worker in range(2)]  # starting again takes as long as it takes
    for at, number in ((4, signal.SIGKILL), (9, signal.SIGTERM)):
        while workers[0].hear("step") < at:
            pass
        workers[1].signal(signal.SIGSTOP)  # so that the job cannot end meanwhile
        assert_in_use(tmp_path / "broken", server, port)
        server.signal(number)
        server.process.join()
        workers[1].signal(signal.SIGCONT)
        server = job.serve(2, port=port, state=tmp_path / "broken", patience=100)
    broken = weights(workers)
    assert_same([*unbroken, *broken])
    assert server.hear("ended") == ""


@pytest.mark.ci
@pytest.mark.timeout(180)
def test_workers_that_are_ahead_survive_a_killed_server_and_a_killed_worker(job: Job, tmp_path) -> None:
    server = job.serve(2, state=tmp_path, patience=100)
    port = int(job.servers.rpartition(":")[2])
    workers = [job.work(worker, 2, 14, timeout=100, staleness=2) for worker in range(2)]
    while workers[0].hear("step") < 4:
        pass
    workers[1].signal(signal.SIGSTOP)  # so that worker 0 runs ahead, and the job cannot end meanwhile
    server.signal(signal.SIGKILL)
    server.process.join()
    server = job.serve(2, port=port, state=tmp_path, patience=100)
    workers[1].signal(signal.SIGKILL)
    workers[1] = job.work(1, 2, 14, timeout=100, staleness=2)
    assert_same(weights(workers))
    assert server.hear("ended") == ""


def assert_in_use(state: Path, server: Process, port: int) -> None:
    """A second server is refused, at the port of the first and at another."""
    for asked in (port, 0):
        with pytest.raises(StateError, match=f"in use by another server .process {server.process.pid} on") as raised:
            ParameterServer(ParameterServerOptions(2, port=asked, state=state))
        assert str(state) in str(raised.value)


@pytest.mark.ci
@pytest.mark.timeout(180)
def test_a_worker_that_is_killed_comes_back(job: Job) -> None:
    server = job.serve(3)
    workers = [job.work(worker, 3, 14) for worker in range(3)]
    while workers[1].hear("step") < 8:
        pass
    workers[1].signal(signal.SIGKILL)
    workers[1] = job.work(1, 3, 14)
    assert_same(weights(workers))
    assert server.hear("ended") == ""


@pytest.mark.ci
@pytest.mark.timeout(180)
def test_a_worker_that_is_frozen_is_replaced_and_fenced(job: Job) -> None:
    job.serve(2, timeout=3.0)
    workers = [job.work(worker, 2, 14) for worker in range(2)]
    while workers[1].hear("step") < 8:
        pass
    zombie = workers[1]
    zombie.signal(signal.SIGSTOP)
    time.sleep(3.5)
    workers[1] = job.work(1, 2, 14)
    while workers[1].hear("step") < 10:
        pass
    zombie.signal(signal.SIGCONT)
    assert "parameter server" in zombie.hear("error")
    assert_same(weights(workers))


@pytest.mark.ci
@pytest.mark.timeout(120)
def test_a_backup_worker_lets_the_others_go_on(job: Job) -> None:
    job.serve(3, timeout=4.0)
    workers = [job.work(worker, 3, 14, backups=1) for worker in range(3)]
    while workers[2].hear("step") < 3:
        pass
    workers[2].signal(signal.SIGKILL)
    assert_same(weights(workers[:2]))


@pytest.mark.ci
@pytest.mark.timeout(120)
def test_the_job_ends_with_one_error_where_a_worker_stays_away(job: Job) -> None:
    server = job.serve(2, timeout=4.0, patience=1.0)
    workers = [job.work(worker, 2, 1000) for worker in range(2)]
    while workers[1].hear("step") < 3:
        pass
    workers[1].signal(signal.SIGKILL)
    began = time.monotonic()
    error = workers[0].hear("error")
    assert "Workers [1] were away for 1 s" in error
    assert "Workers [1] were away for 1 s" in server.hear("ended")
    assert time.monotonic() - began < 10


@pytest.mark.ci
@pytest.mark.timeout(120)
def test_a_server_that_stays_away_is_one_error(job: Job) -> None:
    server = job.serve(1)
    worker = job.work(0, 1, 1000, timeout=3.0)
    while worker.hear("step") < 3:
        pass
    server.signal(signal.SIGKILL)
    error = worker.hear("error")
    assert error.startswith("PeerTimeoutError")
    assert "gave rank 0 no connection for 3 s" in error


@pytest.mark.ci
@pytest.mark.timeout(120)
def test_workers_with_fewer_batches_end_the_job(job: Job) -> None:
    server = job.serve(2)
    workers = [job.work(worker, 2, steps) for worker, steps in enumerate((5, 9))]
    workers[0].hear("weights")
    assert "same number of batches" in workers[1].hear("error")
    assert "same number of batches" in server.hear("ended")
