"""Checkpoint and journal: a server that starts again is where it was, to the bit, wherever it was cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradwire.core.errors import OptionError, StateError
from gradwire.parameter_server.journal import Journal
from gradwire.parameter_server.records import SEAL_BYTES
from gradwire.parameter_server.server import ServerStateMachine
from gradwire.parameter_server.shard import ParameterShard
from gradwire.wire.frame import HEADER_BYTES
from tests.parameter_server.harness import EPOCH, Job, make_config
from tests.parameter_server.recorded import Recorded, contents


@pytest.fixture
def open_job(tmp_path):
    jobs = []

    def make(checkpoint_bytes: int, **options) -> Recorded:
        jobs.append(Recorded(tmp_path, checkpoint_bytes, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.journal.close(checkpoint=False)


@pytest.mark.parametrize("checkpoint_bytes", [1, 3000, 1 << 30])
@pytest.mark.parametrize("staleness", [1, 2])
def test_a_killed_server_has_the_pushes_of_later_steps(open_job, checkpoint_bytes, staleness):
    """Worker 0 is ahead by the staleness when the server is killed; the model is that of an unbroken job."""
    unbroken, job = Job(make_config(workers=2, staleness=staleness)), open_job(checkpoint_bytes, staleness=staleness)
    for each in (unbroken, job):
        each.start()
        each.train(2)
        for _ in range(staleness + 1):
            each.workers[0].begin()
            each.workers[0].push(each.grads())
            each.settle()
    assert not job.workers[0].ready
    before = waiting(job)
    job.kill()
    job.open()
    assert waiting(job) == before
    assert all(sorted(round_.waiting) == [2 + step for step in range(staleness + 1)] for round_ in job.machine.rounds)
    for worker in job.workers:
        worker.join()
    job.settle()
    for each in (unbroken, job):
        for _ in range(staleness + 1):
            each.workers[1].begin()
            each.workers[1].push(each.grads())
            each.settle()
        each.train(2)
        for worker in each.workers:
            for slot, values in zip(worker.slots, worker.values):
                slot.apply(values, slot.newest)
    for tensor in range(2):
        assert job.machine.rounds[tensor].version == staleness + 5
        assert torch.equal(job.shard.parameters[tensor], unbroken.shard.parameters[tensor])
        assert torch.equal(job.workers[0].values[tensor], unbroken.workers[1].values[tensor])


def waiting(job: Job) -> list[dict[tuple[int, int], bytes]]:
    """Pushes that each parameter's steps wait with, by step and worker."""
    return [
        {
            (step, worker): push.body.tobytes()
            for step, pushes in round_.waiting.items()
            for worker, push in pushes.items()
        }
        for round_ in job.machine.rounds
    ]


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
    for kept in (whole + 1, whole + HEADER_BYTES - 1, whole + SEAL_BYTES + HEADER_BYTES + 3):
        path.write_bytes(content[:kept])
        job.open()
        assert [list(round_.pushes) for round_ in job.machine.rounds] == [[0], []]
        job.kill()
        assert path.stat().st_size == kept
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


@pytest.mark.parametrize("checkpoint_bytes", [1500, 1 << 30])
def test_a_server_that_takes_no_frame_changes_nothing(tmp_path, open_job, checkpoint_bytes):
    job = open_job(checkpoint_bytes)
    job.start()
    job.train(3)
    job.workers[0].push(job.grads())
    job.settle()
    before = contents(tmp_path)
    assert any("checkpoint" in name for name in before) == (checkpoint_bytes == 1500)
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


def numbers(folder: Path, name: str) -> list[int]:
    """Numbers of the files of one kind."""
    found = [path.name.removeprefix(name).partition(".")[0] for path in folder.glob(f"{name}*")]
    return sorted(int(number) for number in found)


@pytest.fixture
def two_generations(tmp_path, open_job):
    """A job that was killed after its second checkpoint, in the middle of a step."""
    job = open_job(1500)
    job.start()
    while job.journal._number < 2:
        job.train(1)
    job.workers[0].push(job.grads())
    job.settle()
    job.kill()
    assert numbers(tmp_path, "checkpoint-") == numbers(tmp_path, "journal-") == [1, 2]
    return job


def digest(job: Recorded) -> bytes:
    return job.journal._checkpoints.digest(0)


@pytest.mark.parametrize("damage", ["flip", "missing"])
def test_a_damaged_checkpoint_is_made_up_for_by_the_one_before(tmp_path, two_generations, caplog, damage):
    job = two_generations
    job.open()
    expected = digest(job)
    job.kill()
    newest = tmp_path / "checkpoint-2.safetensors"
    if damage == "flip":
        content = bytearray(newest.read_bytes())
        content[-5] ^= 1
        newest.write_bytes(content)
    else:
        newest.unlink()
    before = contents(tmp_path)
    caplog.clear()
    job.open()
    assert digest(job) == expected
    [message] = caplog.messages
    assert str(newest) in message
    assert ("is missing" if damage == "missing" else "is damaged") in message
    assert "The same state was made from the files before it" in message
    assert contents(tmp_path) == before
    for worker in job.workers:
        worker.join()
    job.settle()
    job.workers[1].push(job.grads())  # the step that was open
    job.settle()
    while job.journal._number < 3:
        job.train(1)
    assert numbers(tmp_path, "journal-") == [1, 2, 3]  # a bad checkpoint is not one of the two that are kept
    while job.journal._number < 4:
        job.train(1)
    assert numbers(tmp_path, "checkpoint-") == numbers(tmp_path, "journal-") == [3, 4]


def test_the_journal_leads_to_a_job_that_trains_further_as_the_last_checkpoint_does(tmp_path, open_job):
    job = open_job(1 << 30)
    job.start()
    job.train(2)
    for worker in range(2):
        job.machine.leave(worker, finished=True)
        job.journal.note_leave(worker, finished=True)
    job.journal.close(checkpoint=True)
    (tmp_path / "checkpoint-1.safetensors").unlink()
    job.open()
    assert job.machine.finished == set()
    for worker in job.workers:
        worker.join()
    job.settle()
    job.train(1)
    assert [round_.version for round_ in job.machine.rounds] == [3, 3]


def test_the_first_checkpoint_is_made_up_for_by_the_first_journal(tmp_path, open_job):
    job = open_job(1500)
    job.start()
    while job.journal._number < 1:
        job.train(1)
    job.kill()
    assert numbers(tmp_path, "journal-") == [0, 1]
    job.open()
    expected = digest(job)
    job.kill()
    (tmp_path / "checkpoint-1.safetensors").unlink()
    job.open()
    assert digest(job) == expected


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        (["journal-2"], "journal-2 is missing: the steps after its checkpoint are lost"),
        (["checkpoint-2.safetensors", "checkpoint-1.safetensors"], "checkpoint-2.safetensors is missing"),
        (["checkpoint-2.safetensors", "journal-1"], "checkpoint-2.safetensors is missing"),
        (["checkpoint-2.safetensors", "journal-2"], None),  # as if the second checkpoint had not been made
    ],
)
def test_files_that_cannot_be_done_without_are_named(tmp_path, two_generations, gone, named):
    job = two_generations
    for name in gone:
        (tmp_path / name).unlink()
    before = contents(tmp_path)
    if named is None:
        job.open()
        return
    with pytest.raises(StateError, match=f"{named}.*Restore the folder from a copy, or start the job") as raised:
        job.open()
    assert str(tmp_path) in str(raised.value)
    assert contents(tmp_path) == before


def test_files_of_different_runs_are_refused(tmp_path, two_generations, open_job):
    """Each of them is whole."""
    job = two_generations
    other = Recorded(tmp_path / "other", 1500)
    other.workers[0].values[0] += 1
    other.start()
    while other.journal._number < 2:
        other.train(1)
    other.kill()
    for name in ("checkpoint-2.safetensors", "journal-2"):
        mine = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes((tmp_path / "other" / name).read_bytes())
        with pytest.raises(StateError, match="journal-2 does not continue the state that the files before it lead to"):
            job.open()
        (tmp_path / name).write_bytes(mine)
    job.open()


def test_a_journal_that_was_cut_off_does_not_stand_in_for_a_checkpoint(tmp_path, two_generations):
    job = two_generations
    (tmp_path / "checkpoint-2.safetensors").unlink()
    path = tmp_path / "journal-1"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    before = contents(tmp_path)
    with pytest.raises(StateError, match=r"checkpoint-2.safetensors is missing\. Restore"):
        job.open()
    assert contents(tmp_path) == before
    path.write_bytes(content[:60] + bytes(4) + content[64:])
    with pytest.raises(StateError, match=r"journal-1 is damaged at byte 56 .* Restore") as raised:
        job.open()
    assert "truncate" not in str(raised.value)  # the next journal could not follow
    path.write_bytes(content)
    job.open()


@pytest.mark.parametrize("name", ["journal-1.new", "checkpoint-1.safetensors.new"])
def test_what_a_server_killed_in_a_checkpoint_leaves_is_no_harm(tmp_path, open_job, name):
    job = open_job(1 << 30)
    job.start()
    job.train(2)
    job.kill()
    (tmp_path / name).write_bytes(b"the beginning of a file")
    job.open()
    job.journal.close(checkpoint=True)
    assert sorted(contents(tmp_path)) == ["checkpoint-1.safetensors", "journal-0", "journal-1"]
    job.open()
    assert [round_.version for round_ in job.machine.rounds] == [2, 2]


def test_a_server_killed_between_journal_and_checkpoint_goes_on(tmp_path, open_job):
    job = open_job(1 << 30)
    job.start()
    job.train(2)
    job.journal.checkpoint()
    job.kill()
    (tmp_path / "checkpoint-1.safetensors").unlink()  # it comes last
    job.open()
    for worker in job.workers:
        worker.join()
    job.settle()
    job.train(1)
    job.journal.checkpoint()
    job.kill()
    job.open()
    assert [round_.version for round_ in job.machine.rounds] == [3, 3]
    assert numbers(tmp_path, "checkpoint-") == [2]
    assert numbers(tmp_path, "journal-") == [0, 1, 2]


def test_an_unknown_fsync_is_refused_with_those_that_there_are(tmp_path):
    with pytest.raises(OptionError, match=r"fsync='never' is unknown\. Pass one of 'always', 'checkpoint'"):
        Journal(tmp_path, ServerStateMachine(2, EPOCH, ParameterShard()), fsync="never")
