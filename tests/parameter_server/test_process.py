"""A parameter server on a thread: its state, its queue, and workers that are not as they should be."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import gradwire as gw
from gradwire.core.errors import PeerTimeoutError, SyncError
from gradwire.net.keys import job_epoch
from gradwire.parameter_server.journal import Journal
from gradwire.parameter_server.process import MAX_QUEUED_BYTES, ParameterServer, ParameterServerOptions
from gradwire.parameter_server.round import Push, Round
from gradwire.parameter_server.server import ServerStateMachine
from gradwire.parameter_server.shard import ParameterShard
from gradwire.wire.frame import FrameFlags, FrameKind
from tests.net.stranger import Stranger
from tests.parameter_server.clients import backward, connect, linear, sgd, train_step


def test_a_server_that_cannot_listen_gives_its_state_back(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for _ in range(2):
            with pytest.raises(OSError, match="in use") as raised:
                ParameterServer(ParameterServerOptions(1, port=taken.getsockname()[1], state=tmp_path))
            assert raised.value.errno == errno.EADDRINUSE


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
    worker = Thread(target=train_until_it_ends, args=(server,))
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
    optimizer = sgd(model, momentum=0.9)
    for step in range(machine.rounds[0].version):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    assert machine.rounds[0].version == stop_at - 1
    torch.testing.assert_close(machine.shard.parameters[0].detach(), model.weight.detach())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fsync", ["always", "checkpoint"])
def test_a_power_failure_loses_nothing_that_a_worker_knows_if_all_is_synced(tmp_path, monkeypatch, fsync) -> None:
    """After each update, the journal is cut where it was last written to disk."""
    synced: dict[int, int] = {}

    def note(number: int) -> None:
        written(number)
        synced[os.fstat(number).st_ino] = os.fstat(number).st_size

    written = os.fsync
    monkeypatch.setattr(os, "fsync", note)
    server = ParameterServer(ParameterServerOptions(1, state=tmp_path / "state", fsync=fsync))
    serving = Thread(target=server.run)
    serving.start()
    journal = tmp_path / "state" / "journal-0"
    kept = []
    with connect(server) as client:
        for step in range(4):
            train_step(client, step)
            client.wait()
            kept.append(journal.read_bytes()[: synced[journal.stat().st_ino]])
    serving.join()
    versions = [version_after_restart(tmp_path / str(step), content) for step, content in enumerate(kept)]
    assert versions == ([1, 2, 3, 4] if fsync == "always" else [None] * 4)


def version_after_restart(folder: Path, content: bytes) -> int | None:
    folder.mkdir()
    (folder / "journal-0").write_bytes(content)
    machine = ServerStateMachine(1, job_epoch("gradwire"), ParameterShard())
    journal = Journal(folder, machine)
    journal.restore()
    journal.close(checkpoint=False)
    return machine.rounds[0].version if machine.rounds else None


@pytest.mark.timeout(120)
def test_the_journal_stands_in_for_the_last_checkpoint_of_a_job_with_backups(tmp_path) -> None:
    """Workers 0 and 1 have finished, and too few are left for another step of worker 2."""
    server = ParameterServer(ParameterServerOptions(3, state=tmp_path))
    serving = Thread(target=server.run)
    serving.start()

    def work(worker: int) -> None:
        with connect(server, gw.JobOptions(worker=worker, workers=3, backups=1)) as client:
            while train_step(client, client.steps) and (worker == 2 or client.steps < 3):
                pass

    workers = [Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in workers:
        thread.start()
    for thread in [*workers, serving]:
        thread.join(60)
    versions = [round_.version for round_ in server.machine.rounds]
    (tmp_path / "checkpoint-1.safetensors").unlink()
    machine = ServerStateMachine(3, job_epoch("gradwire"), ParameterShard())
    journal = Journal(tmp_path, machine)
    journal.restore()
    journal.close(checkpoint=False)
    assert [round_.version for round_ in machine.rounds] == versions


def train_until_it_ends(server: ParameterServer) -> None:
    with contextlib.suppress(SyncError), connect(server, momentum=0.9, compressor="none") as client:
        while True:
            train_step(client, client.steps)


@pytest.mark.timeout(120)
def test_what_an_older_process_said_does_not_cost_its_replacement_the_connection() -> None:
    server = ParameterServer(ParameterServerOptions(1))
    steps: list[int] = []
    worker = Thread(target=train, args=(server, 3, steps))
    zombie = Stranger(server.address, 0, 1, (FrameKind.JOIN, b"{}"))

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


def train(server: ParameterServer, num_steps: int, steps: list[int]) -> None:
    with connect(server) as client:
        while client.steps < num_steps:
            train_step(client, client.steps)
            steps.append(client.steps)


@pytest.mark.timeout(120)
def test_a_fast_worker_goes_on_while_a_slow_one_computes_and_all_end_with_the_same_model() -> None:
    server = ParameterServer(ParameterServerOptions(2))
    serving = Thread(target=server.run)
    serving.start()
    is_ahead, models, reports = Event(), [], []

    def work(worker: int) -> None:
        with connect(server, gw.JobOptions(worker=worker, workers=2, staleness=2)) as client:
            for step in range(6):
                if worker == 1 and step == 0:
                    assert is_ahead.wait(60)
                train_step(client, step)
                if worker == 0 and step == 2:  # three steps, and no update has come
                    is_ahead.set()
            client.wait()
            models.append(client.model.weight.detach().clone())
            reports.append(client.report())

    threads = [Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in [*threads, serving]:
        thread.join(60)
    assert torch.equal(*models)
    assert [(report.steps, report.late_share) for report in reports] == [(6, 0.0)] * 2
    counts = {count.name: count.value for count in server.counts()}
    assert (counts["updates_total"], counts["updates_sent_total"]) == (6, 12)


@pytest.mark.timeout(120)
def test_a_clock_that_runs_behind_fences_nobody(monkeypatch) -> None:
    """The machine of the replacement has another idea of the time."""
    server = ParameterServer(ParameterServerOptions(1))
    serving = Thread(target=server.run)
    serving.start()
    first = connect(server)
    train_step(first, 0)
    first.wait()
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    monkeypatch.setattr(time, "time", lambda: 1e-9)
    with connect(server) as second:
        with pytest.raises(SyncError, match="This process of worker 0 has been replaced by a newer one"):
            take_step(first)
        first.close("over")
        assert second.steps == 1
        take_step(second)
    serving.join()
    assert server.machine.rounds[0].version == 2


def take_step(client: gw.ParameterClient) -> None:
    train_step(client, 1)
    client.wait()


@pytest.mark.timeout(120)
def test_a_worker_with_another_model_is_refused_and_the_job_goes_on() -> None:
    server = ParameterServer(ParameterServerOptions(2))
    serving = Thread(target=server.run)
    serving.start()
    at_half = Barrier(3)
    steps: list[int] = []

    def work(worker: int) -> None:
        with connect(server, gw.JobOptions(worker=worker, workers=2)) as client:
            for step in range(6):
                if step == 3:
                    at_half.wait(60)
                    at_half.wait(60)
                train_step(client, step)
            client.wait()
            steps.append(client.steps)

    threads = [Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    at_half.wait(60)
    other = torch.nn.Linear(48, 7, bias=False)
    with pytest.raises(SyncError, match=r"Worker 1 has parameter .*\(7, 48\).* where others have .*\(5, 48\)"):
        gw.ParameterClient(other, sgd(other), f"127.0.0.1:{server.address[1]}", job=gw.JobOptions(worker=1, workers=2))
    at_half.wait(60)
    for thread in [*threads, serving]:
        thread.join(60)
    assert steps == [6, 6]


@pytest.mark.timeout(60)
def test_who_waits_for_a_worker_that_was_refused_is_told_why() -> None:
    server, ends = ParameterServer(ParameterServerOptions(2, patience=timedelta(seconds=0.5))), []

    def serve() -> None:
        with pytest.raises(PeerTimeoutError) as caught:
            server.run()
        ends.append(caught.value)

    serving = Thread(target=serve)
    serving.start()
    client = connect(server, gw.JobOptions(worker=0, workers=2))
    other = torch.nn.Linear(48, 7, bias=False)
    with pytest.raises(SyncError, match=r"Worker 1 has parameter"):
        gw.ParameterClient(other, sgd(other), f"127.0.0.1:{server.address[1]}", job=gw.JobOptions(worker=1, workers=2))
    with pytest.raises(SyncError, match=r"Worker 1 was refused, and has not come back .* Worker 1 has parameter"):
        take_step(client)
    with contextlib.suppress(SyncError):
        client.close()
    serving.join(60)
    assert ends[0].rank == 1


@pytest.mark.timeout(120)
def test_a_flood_waits_at_its_sender() -> None:
    server = ParameterServer(ParameterServerOptions(1))
    size = 1 << 20
    stranger = Stranger(server.address, 0, 1, (FrameKind.JOIN, b"{}"), *[(FrameKind.GROUPS, bytes(size))] * 300)
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
    worker = Stranger(server.address, 0, 1, (FrameKind.JOIN, b"{}"))
    with pytest.raises(SyncError, match="IndexError"):
        server.run(lambda text: None)
    assert "IndexError" in str(worker.told.get(timeout=20))
    worker.endpoint.close()


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """What the server's clock shows."""
    now = [100.0]
    monkeypatch.setattr("gradwire.parameter_server.process.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@contextlib.contextmanager
def without_loop(options: ParameterServerOptions) -> Iterator[ParameterServer]:
    """A server whose loop is the test."""
    server = ParameterServer(options)
    server._endpoint.start()
    try:
        yield server
    finally:
        server._endpoint.close()


@pytest.mark.parametrize(("had_come", "seconds"), [(True, 9), (False, 29)])
def test_each_missing_worker_has_the_whole_patience(clock, had_come, seconds) -> None:
    """Worker 2 is lost at the moment when worker 1 is back, or joins at last."""
    limits = {"patience": timedelta(seconds=10), "start_timeout": timedelta(seconds=30)}
    with without_loop(ParameterServerOptions(3, **limits)) as server:
        machine = server.machine
        machine.incarnations = {worker: [1] for worker in (0, 1, 2) if had_come or worker != 1}
        machine.present = {0, 2}
        server._check_away()
        clock[0] += seconds
        machine.incarnations[1] = [1]
        machine.present = {0, 1}
        server._check_away()
        clock[0] += 9
        server._check_away()
        clock[0] += 0.5
        machine.present = {1}
        server._check_away()
        clock[0] += 1
        with pytest.raises(PeerTimeoutError, match=r"Workers \[2\] were away for 10 s") as caught:
            server._check_away()  # worker 0 has been away for a second
    assert caught.value.rank == 2


@pytest.mark.parametrize(("present", "named"), [({0, 2}, [2]), ({0}, [1, 2])])
def test_workers_that_are_connected_and_hold_up_a_step_are_named(clock, present, named) -> None:
    with without_loop(ParameterServerOptions(3, stall_timeout=timedelta(seconds=10))) as server:
        server.machine.present = present
        server.machine.rounds = [Round(3)]
        server.machine.rounds[0].add(0, 0, Push(FrameFlags.NONE, np.empty(0, np.uint8), ({},)))
        server._check_stalled()
        clock[0] += 11
        with pytest.raises(PeerTimeoutError, match=re.escape(f"Workers {named} did not send")) as caught:
            server._check_stalled()
    assert caught.value.rank == named[0]


@pytest.mark.timeout(120)
def test_a_worker_that_hangs_while_its_connection_lives_ends_the_job() -> None:
    limits = {"patience": timedelta(seconds=0.2), "stall_timeout": timedelta(seconds=1)}
    server = ParameterServer(ParameterServerOptions(2, **limits))
    over = Event()
    errors: list[str] = []

    def work(worker: int) -> None:
        client = connect(server, gw.JobOptions(worker=worker, workers=2))
        train_step(client, 0)
        try:
            if worker == 1:
                assert over.wait(60)
            train_step(client, 1)
            client.close()
        except SyncError as error:
            errors.append(str(error))
            client.close(str(error))

    threads = [Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    with pytest.raises(PeerTimeoutError, match=r"Workers \[1\] did not send gradients of step 1 within 1 s"):
        server.run()
    over.set()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert all("Workers [1]" in error for error in errors)


@pytest.mark.ci
@pytest.mark.timeout(120)
def test_a_live_worker_may_hold_up_a_step_for_longer_than_a_silent_one() -> None:
    limit = timedelta(seconds=1)
    server = ParameterServer(ParameterServerOptions(2, timeout=limit, patience=limit))
    serving = Thread(target=server.run)
    serving.start()
    steps: list[int] = []

    def work(worker: int) -> None:
        job, options = gw.JobOptions(worker=worker, workers=2), gw.ConnectionOptions(timeout=limit)
        with connect(server, job, connection=options) as client:
            train_step(client, 0)
            if worker == 1:
                Event().wait(2.5)  # evaluates
            train_step(client, 1)
            client.wait()
            steps.append(client.steps)

    threads = [Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in [*threads, serving]:
        thread.join(60)
    assert steps == [2, 2]
