"""Parameter servers and workers as real processes: killed, frozen, returning."""

from __future__ import annotations

import contextlib
import errno
import queue
import signal
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import gradwire as gw
from gradwire.core.errors import OptionError, PeerTimeoutError, StateError, SyncError
from gradwire.net.handshake import GroupMember
from gradwire.net.keys import job_epoch, job_key
from gradwire.net.reconnecting import ReconnectingEndpoint
from gradwire.parameter_server.journal import Journal
from gradwire.parameter_server.process import MAX_QUEUED_BYTES, ParameterServer, ParameterServerOptions
from gradwire.parameter_server.server import ServerStateMachine
from gradwire.parameter_server.shard import ParameterShard
from gradwire.wire.frame import FrameKind, Header
from tests.parameter_server.processes import Process, batch, serve, work

ALONE = gw.JobOptions(worker=0, workers=1)


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

    def work(self, worker: int, workers: int, steps: int, timeout: float = 30.0, backups: int = 0) -> Process:
        return self.start(work, worker, workers, self.servers, steps, timeout, backups)


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
@pytest.mark.timeout(180)
def test_a_server_that_is_killed_or_stopped_goes_on_where_it_was(job: Job, tmp_path) -> None:
    """The weights in the end are those of a run that nothing has happened to, bit for bit.

    A second server that is started on its state is refused, and has no part in them.
    """
    job.serve(2, state=tmp_path / "unbroken")
    unbroken = weights([job.work(worker, 2, 14) for worker in range(2)])
    assert_same(unbroken)

    server = job.serve(2, state=tmp_path / "broken")
    port = int(job.servers.rpartition(":")[2])
    workers = [job.work(worker, 2, 14) for worker in range(2)]
    for at, number in ((4, signal.SIGKILL), (9, signal.SIGTERM)):
        while workers[0].hear("step") < at:
            pass
        workers[1].signal(signal.SIGSTOP)  # so that the job cannot end meanwhile
        assert_in_use(tmp_path / "broken", server, port)
        server.signal(number)
        server.process.join()
        workers[1].signal(signal.SIGCONT)
        server = job.serve(2, port=port, state=tmp_path / "broken")
    broken = weights(workers)
    assert_same([*unbroken, *broken])
    assert server.hear("ended") == ""


def assert_in_use(state: Path, server: Process, port: int) -> None:
    """A second server is refused, at the port of the first and at another."""
    for asked in (port, 0):
        with pytest.raises(StateError, match=f"in use by another server .process {server.process.pid} on") as raised:
            ParameterServer(ParameterServerOptions(2, port=asked, state=state))
        assert str(state) in str(raised.value)


def test_a_server_that_cannot_listen_gives_its_state_back(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for _ in range(2):
            with pytest.raises(OSError, match="in use") as raised:
                ParameterServer(ParameterServerOptions(1, port=taken.getsockname()[1], state=tmp_path))
            assert raised.value.errno == errno.EADDRINUSE


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
    worker = job.work(0, 1, 1000, timeout=1.0)
    while worker.hear("step") < 3:
        pass
    server.signal(signal.SIGKILL)
    error = worker.hear("error")
    assert error.startswith("PeerTimeoutError")
    assert "gave rank 0 no connection for 1 s" in error


@pytest.mark.ci
@pytest.mark.timeout(120)
def test_workers_with_fewer_batches_end_the_job(job: Job) -> None:
    server = job.serve(2)
    workers = [job.work(worker, 2, steps) for worker, steps in enumerate((5, 9))]
    workers[0].hear("weights")
    assert "same number of batches" in workers[1].hear("error")
    assert "same number of batches" in server.hear("ended")


@pytest.mark.timeout(120)
def test_a_step_that_was_cut_short_is_not_taken_twice(tmp_path) -> None:
    """Ctrl-C between the optimizer's step and the update: a server that starts again takes that step once."""
    stop_at, stepped = 4, []

    def interrupt(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer.param_groups[0]["params"][0].numel() > 1:  # none of those that try hyperparameters
            stepped.append(optimizer)
        if len(stepped) == stop_at:
            raise KeyboardInterrupt

    server = ParameterServer(ParameterServerOptions(1, state=tmp_path))
    worker = Thread(target=train_until_it_ends, args=(f"127.0.0.1:{server.address[1]}",))
    hook = register_optimizer_step_post_hook(interrupt)
    worker.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            server.run()
    finally:
        hook.remove()
        worker.join()
    machine = ServerStateMachine(1, job_epoch("gradwire"), ParameterShard())
    journal = Journal(tmp_path, machine)
    journal.restore()
    journal.close(checkpoint=False)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(machine.rounds[0].version):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    assert machine.rounds[0].version == stop_at - 1
    torch.testing.assert_close(machine.shard.parameters[0].detach(), model.weight.detach())


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(48, 5, bias=False)


def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    x, y = batch(0, step)
    return torch.nn.functional.cross_entropy(model(x), y)


def train_until_it_ends(server: str) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with (
        contextlib.suppress(SyncError),
        gw.ParameterClient(model, optimizer, server, compressor="none", job=ALONE) as client,
    ):
        while True:
            loss(model, client.steps).backward()
            client.step()


@pytest.mark.timeout(120)
def test_residuals_are_loaded_as_they_were_saved() -> None:
    """Also right after a step, while the encoder thread still pushes and the update of the step is on its way."""
    server = ParameterServer(ParameterServerOptions(1))
    serving = Thread(target=server.run)
    serving.start()
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    transfer = gw.TransferOptions(min_elements=64, chunk_elements=100)  # several chunks
    address = f"127.0.0.1:{server.address[1]}"
    with gw.ParameterClient(model, optimizer, address, job=ALONE, transfer=transfer) as client:
        saved: dict[str, torch.Tensor] = {}
        for step in range(5):
            loss(model, step).backward()
            client.step()
            saved = saved or client.state_dict()
        assert saved["weight"].count_nonzero() > 100
        client.load_state_dict({name: residual.double() for name, residual in saved.items()})
        loaded = client.state_dict()
        with pytest.raises(OptionError, match="Load the state of the same model"):
            client.load_state_dict({"weight": torch.zeros(3)})
    serving.join()
    assert loaded.keys() == saved.keys()
    assert torch.equal(loaded["weight"], saved["weight"])


class Stranger:
    """Holds the job's key, and says what it is told when it is connected."""

    def __init__(self, port: int, worker: int, workers: int, *frames: tuple[FrameKind, bytes]) -> None:
        self.told: queue.SimpleQueue[SyncError | None] = queue.SimpleQueue()
        self._frames = frames
        self._member = GroupMember("gradwire", worker, workers + 1, job_epoch("gradwire"))
        call = workers, ("127.0.0.1", port)
        self.endpoint = ReconnectingEndpoint(
            self._member, job_key("127.0.0.1", "gradwire"), self, timeout=timedelta(seconds=10), call=call
        )
        self.endpoint.start()

    def admit(self, peer: int, header: Header) -> None:
        """Whatever it is."""

    def joined(self, peer: int) -> None:
        for kind, words in self._frames:
            header = Header(kind, sender=self._member.rank, epoch=self._member.epoch)
            self.endpoint.send(peer, header, np.frombuffer(words, np.uint8))

    def deliver(self, peer: int, header: Header, body: np.ndarray) -> None:
        """Nothing to do."""

    def left(self, peer: int, error: SyncError | None) -> None:
        self.told.put(error)


@pytest.mark.timeout(120)
def test_what_an_older_process_said_does_not_cost_its_replacement_the_connection() -> None:
    server = ParameterServer(ParameterServerOptions(1))
    steps: list[int] = []
    worker = Thread(target=train, args=(server.address[1], 3, steps))
    zombie = Stranger(server.address[1], 0, 1, (FrameKind.JOIN, b"{}"))

    def hold_up(event: str) -> None:
        """Look at the zombie's first words when its replacement is connected."""
        if event == "Worker 0: joined" and not worker.is_alive() and not steps:
            zombie.endpoint.close()
            worker.start()
            until = time.monotonic() + 30
            while server._endpoint.connection(0) < 2 and time.monotonic() < until:
                time.sleep(0.01)

    server.run(hold_up)
    worker.join()
    assert steps == [1, 2, 3]


def train(port: int, num_steps: int, steps: list[int]) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with gw.ParameterClient(model, optimizer, f"127.0.0.1:{port}", job=ALONE) as client:
        while client.steps < num_steps:
            loss(model, client.steps).backward()
            client.step()
            steps.append(client.steps)


@pytest.mark.timeout(120)
def test_a_straggler_ends_in_good_order_when_enough_others_have_finished() -> None:
    server = ParameterServer(ParameterServerOptions(3))
    others_finished = Event()
    found: dict[int, tuple[list[bool], torch.Tensor]] = {}

    def work(worker: int) -> None:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        servers = f"127.0.0.1:{server.address[1]}"
        goes_on = []
        options = gw.JobOptions(worker=worker, workers=3, backups=1)
        with gw.ParameterClient(model, optimizer, servers, job=options) as client:
            for step in range(8):
                loss(model, step).backward()
                goes_on.append(client.step())
                if worker == 2:
                    assert others_finished.wait(60)
        assert client.finished == (worker == 2)
        found[worker] = goes_on, model.weight.detach()

    threads = [Thread(target=work, args=(worker,)) for worker in range(3)]
    serving = Thread(target=server.run)
    for thread in [serving, *threads]:
        thread.start()
    for thread in threads[:2]:
        thread.join()
    others_finished.set()
    for thread in [threads[2], serving]:
        thread.join()
    assert found[0][0] == [True] * 8
    assert not found[2][0][-1]
    for worker in (1, 2):
        assert torch.equal(found[worker][1], found[0][1])


@pytest.mark.timeout(120)
def test_a_worker_that_fails_in_its_last_step_has_not_finished() -> None:
    server = ParameterServer(ParameterServerOptions(1, patience=timedelta(seconds=1)))

    def fail() -> None:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        client = gw.ParameterClient(model, optimizer, f"127.0.0.1:{server.address[1]}", job=ALONE)
        client._encoder.submit(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            client.close()

    worker = Thread(target=fail)
    worker.start()
    events: list[str] = []
    with pytest.raises(PeerTimeoutError):
        server.run(events.append)
    worker.join()
    assert any("gave up: ZeroDivisionError" in event for event in events)


@pytest.mark.timeout(120)
def test_a_flood_waits_at_its_sender() -> None:
    server = ParameterServer(ParameterServerOptions(1))
    size = 1 << 20
    stranger = Stranger(server.address[1], 0, 1, (FrameKind.JOIN, b"{}"), *[(FrameKind.GROUPS, bytes(size))] * 300)
    num_queued = []

    def watch(event: str) -> None:
        until = time.monotonic() + 30
        while sum(server._queued_bytes) <= MAX_QUEUED_BYTES and time.monotonic() < until:
            time.sleep(0.01)
        with contextlib.suppress(queue.Empty):  # what more would come, if it were read
            stranger.told.get(timeout=1.0)
        num_queued.append(server._events.qsize())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server.run(watch)
    stranger.endpoint.close("over")
    assert MAX_QUEUED_BYTES // size <= num_queued[0] <= MAX_QUEUED_BYTES // size + 20


@pytest.mark.timeout(30)
def test_an_exception_on_the_endpoints_thread_ends_the_server() -> None:
    server = ParameterServer(ParameterServerOptions(1))
    server._queued_bytes.clear()  # so that no frame can be taken
    worker = Stranger(server.address[1], 0, 1, (FrameKind.JOIN, b"{}"))
    with pytest.raises(SyncError, match="IndexError"):
        server.run(lambda text: None)
    assert "IndexError" in str(worker.told.get(timeout=20))
    worker.endpoint.close()


@pytest.mark.timeout(120)
def test_a_worker_that_hangs_while_its_connection_lives_ends_the_job() -> None:
    server = ParameterServer(ParameterServerOptions(2, patience=timedelta(seconds=0.2)))
    over = Event()
    errors: list[str] = []

    def work(worker: int) -> None:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        options = gw.JobOptions(worker=worker, workers=2)
        client = gw.ParameterClient(model, optimizer, f"127.0.0.1:{server.address[1]}", job=options)
        loss(model, 0).backward()
        client.step()
        try:
            if worker == 1:
                assert over.wait(60)
            loss(model, 1).backward()
            client.step()
            client.close()
        except SyncError as error:
            errors.append(str(error))
            client.close(str(error))

    threads = [Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    with pytest.raises(
        PeerTimeoutError, match=r"Workers \[1\] are connected, but did not send gradients of step 1 within 1 s"
    ):
        server.run()
    over.set()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert all("Workers [1]" in error for error in errors)
