"""Checkpoint and journal: a server that starts again is where it was, to the bit, wherever it was cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradwire.core.errors import StateError
from gradwire.parameter_server.journal import Journal
from gradwire.parameter_server.server import ServerStateMachine
from gradwire.parameter_server.shard import ParameterShard
from gradwire.wire.frame import HEADER_BYTES
from tests.parameter_server.harness import EPOCH, Job, make_config


class Recorded(Job):
    """A job whose server keeps a journal."""

    def __init__(self, folder: Path, checkpoint_bytes: int, **options) -> None:
        super().__init__(make_config(workers=2, **options))
        self.folder = folder
        self.checkpoint_bytes = checkpoint_bytes
        self.open()

    def open(self) -> None:
        self.shard = ParameterShard()
        self.machine = ServerStateMachine(2, EPOCH, self.shard)
        self.journal = Journal(self.folder, self.machine, self.checkpoint_bytes)
        self.journal.restore()

    def deliver(self, worker) -> None:
        header, body = worker.outbox[0]
        super().deliver(worker)
        self.journal.note(header, body)

    def kill(self) -> None:
        """As kill -9 does: nothing more is written, nothing under way arrives."""
        self.journal.close(checkpoint=False)
        for worker in self.workers:
            worker.inbox.clear()
            worker.outbox.clear()


@pytest.fixture
def open_job(tmp_path):
    jobs = []

    def make(checkpoint_bytes: int, **options) -> Recorded:
        jobs.append(Recorded(tmp_path, checkpoint_bytes, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.journal.close(checkpoint=False)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad"])
@pytest.mark.parametrize("checkpoint_bytes", [1, 3000, 1 << 30])
def test_a_killed_server_is_where_it_was(open_job, optimizer, checkpoint_bytes):
    unbroken = Job(make_config(workers=2, optimizer=optimizer), seed=0)
    unbroken.start()
    unbroken.train(12)
    job = open_job(checkpoint_bytes, optimizer=optimizer)
    job.start()
    job.train(5)
    for worker in job.workers:  # killed in the middle of a step
        worker.begin()
        worker.push(job.grads())
    job.deliver(job.workers[1])
    job.kill()
    before = [view.clone() for view in job.shard.replicas.values()]
    job.open()
    assert [round_.version for round_ in job.machine.rounds] == [5, 5]
    assert list(job.machine.rounds[0].pushes) == [1]
    assert all(torch.equal(job.shard.replicas[tensor], view) for tensor, view in enumerate(before))
    for worker in job.workers:
        worker.join()
    job.settle()
    job.train(6)
    for tensor in range(2):
        assert torch.equal(job.shard.parameters[tensor], unbroken.shard.parameters[tensor])
        assert torch.equal(job.workers[0].values[tensor], unbroken.workers[0].values[tensor])


@pytest.mark.parametrize("checkpoint_bytes", [1, 1 << 30])
def test_who_has_finished_is_not_waited_for_again(open_job, checkpoint_bytes):
    job = open_job(checkpoint_bytes)
    job.start()
    job.train(2)
    for worker in range(2):
        job.machine.leave(worker, finished=True)
        job.journal.note_leave(worker, finished=True)
        if worker == 0:
            job.kill()
            job.open()
            assert job.machine.finished == {0}
            job.workers[1].join()
            job.settle()
    job.journal.close(checkpoint=True)
    job.open()
    assert job.machine.finished == set()  # the job is over: whoever starts it again trains further


@pytest.mark.parametrize("checkpoint_bytes", [1, 1 << 30])
def test_a_step_keeps_its_hyperparameters(open_job, checkpoint_bytes):
    job = open_job(checkpoint_bytes)
    job.start()
    job.workers[0].push(job.grads())
    job.settle()
    job.kill()
    job.open()
    for worker in job.workers:
        worker.join(({"lr": 0.0},))
    job.settle()
    before = job.shard.parameters[0].detach().clone()
    job.workers[1].push(job.grads())
    job.settle()
    assert not torch.equal(job.shard.parameters[0], before)


def test_a_frame_that_was_cut_off_is_sent_again(tmp_path, open_job):
    job = open_job(1 << 30)
    job.start()
    job.train(2)
    for worker in job.workers:
        worker.begin()
        worker.push(job.grads())
    job.deliver(job.workers[0])
    whole = (tmp_path / "journal-0").stat().st_size
    job.deliver(job.workers[0])
    job.kill()
    path = tmp_path / "journal-0"
    content = path.read_bytes()
    for kept in (whole + 1, whole + HEADER_BYTES - 1, whole + HEADER_BYTES + 3):
        path.write_bytes(content[:kept])
        job.open()
        job.kill()
        assert path.stat().st_size == whole
        path.write_bytes(content[:kept])
    job.open()
    for worker in job.workers:
        worker.join()
    job.settle()
    assert [round_.version for round_ in job.machine.rounds] == [3, 3]


@pytest.mark.parametrize("checkpoint_bytes", [1, 1 << 30])
def test_a_state_of_another_number_of_workers_is_refused(tmp_path, open_job, checkpoint_bytes):
    job = open_job(checkpoint_bytes)
    job.start()
    job.train(1)
    job.kill()
    machine = ServerStateMachine(3, EPOCH, ParameterShard())
    with pytest.raises(StateError, match="Start") as raised:
        Journal(tmp_path, machine).restore()
    assert str(tmp_path) in str(raised.value)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


@pytest.mark.parametrize("checkpoint_bytes", [1500, 1 << 30])
def test_a_server_that_takes_no_frame_changes_nothing(tmp_path, open_job, checkpoint_bytes):
    job = open_job(checkpoint_bytes)
    job.start()
    job.train(3)
    job.workers[0].push(job.grads())
    job.settle()
    before = contents(tmp_path)
    assert ("checkpoint.safetensors" in before) == (checkpoint_bytes == 1500)
    with pytest.raises(StateError, match="in use"):
        job.open()
    job.journal.close(checkpoint=False)
    for _ in range(2):
        job.open()
        job.kill()
        assert contents(tmp_path) == before
    job.open()
    for worker in job.workers:
        worker.join()
    job.settle()
    assert job.machine.present == {0, 1}
    job.kill()
    job.open()  # what the last server wrote down is read again, departures first
    assert [round_.version for round_ in job.machine.rounds] == [3, 3]
    assert list(job.machine.rounds[0].pushes) == [0]


def test_an_end_that_lost_power_is_sent_again(tmp_path, open_job, caplog):
    job = open_job(1 << 30)
    job.start()
    job.train(2)
    whole = (tmp_path / "journal-0").stat().st_size
    for worker in job.workers:
        worker.push(job.grads())
    job.settle()
    job.kill()
    path = tmp_path / "journal-0"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:whole] + bytes(size - whole))
    job.open()
    assert [round_.version for round_ in job.machine.rounds] == [2, 2]
    assert path.stat().st_size == whole
    [message] = caplog.messages
    assert f"{size - whole} bytes" in message
    assert str(path) in message


def test_a_journal_that_was_damaged_is_refused(tmp_path, open_job):
    job = open_job(1 << 30)
    job.start()
    job.train(2)
    job.kill()
    path = tmp_path / "journal-0"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    for _ in range(2):  # and not held by who has refused it
        with pytest.raises(StateError, match=r"journal-0 is damaged at byte \d+") as raised:
            job.open()
        assert "network" not in str(raised.value)
    assert path.read_bytes() == content


def test_a_journal_or_checkpoint_that_is_missing_is_refused(tmp_path, open_job):
    job = open_job(1500)
    job.start()
    job.train(4)
    assert job.journal._number > 0
    job.workers[0].push(job.grads())
    job.settle()
    job.kill()
    journal = tmp_path / f"journal-{job.journal._number}"
    checkpoint = tmp_path / "checkpoint.safetensors"
    for path in (journal, checkpoint):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(StateError, match="missing") as raised:
            job.open()
        assert str(path) in str(raised.value)
        path.write_bytes(content)
    job.open()


def test_an_older_checkpoint_is_refused(tmp_path, open_job):
    job = open_job(1500)
    job.start()
    checkpoint = tmp_path / "checkpoint.safetensors"
    while not checkpoint.exists():
        job.train(1)
    old, number = checkpoint.read_bytes(), job.journal._number
    while job.journal._number == number:
        job.train(1)
    job.workers[0].push(job.grads())
    job.settle()
    job.kill()
    checkpoint.write_bytes(old)
    (tmp_path / f"journal-{number}").touch()
    with pytest.raises(StateError, match="older than the journal"):
        job.open()


@pytest.mark.parametrize("name", ["journal-1", "checkpoint.new"])
def test_what_a_server_killed_in_a_checkpoint_leaves_is_no_harm(tmp_path, open_job, name):
    job = open_job(1 << 30)
    job.start()
    job.train(2)
    job.kill()
    (tmp_path / name).write_bytes(b"" if name == "journal-1" else b"the beginning of a file")
    job.open()
    job.journal.close(checkpoint=True)
    assert sorted(contents(tmp_path)) == ["checkpoint.safetensors", "journal-1"]
    job.open()
    assert [round_.version for round_ in job.machine.rounds] == [2, 2]
