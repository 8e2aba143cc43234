"""Workers that run ahead of the slowest, by at most the staleness."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.core.errors import FrameError
from tests.parameter_server.books import assert_conserved, assert_same
from tests.parameter_server.harness import Job, Worker, make_config


def run_ahead(job: Job, worker: Worker) -> int:
    """Let a worker take steps while it can, and return how many."""
    steps = 0
    while worker.ready:
        worker.begin()
        worker.push(job.grads())
        job.settle()
        steps += 1
    return steps


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_fast_worker_runs_ahead_of_the_slowest_by_the_staleness(staleness):
    job = Job(make_config(workers=3, staleness=staleness), seed=1)
    job.start()
    first = [values.clone() for values in job.workers[0].values]
    assert [run_ahead(job, worker) for worker in job.workers[:2]] == [staleness + 1] * 2
    slow = job.workers[2]
    for step in range(4):  # each of its steps lets the others take one
        assert [round_.version for round_ in job.machine.rounds] == [step, step]
        slow.begin()
        slow.push(job.grads())
        job.settle()
        assert [run_ahead(job, worker) for worker in job.workers[:2]] == [1, 1]
    run_ahead(job, slow)
    for worker in job.workers:
        for slot, values in zip(worker.slots, worker.values):
            slot.apply(values, slot.newest)
    assert_same(job)
    assert_conserved(job, first)


def test_a_push_beyond_the_staleness_is_refused():
    job = Job(make_config(staleness=2), seed=1)
    job.start()
    slot = job.workers[0].slots[0]
    header, body = slot.push(job.grads()[0], 3)
    with pytest.raises(FrameError, match="A push for step 2 at most is due"):
        job.machine.receive(0, header, body)
    assert job.machine.rounds[0].waiting == {}


def test_a_worker_with_another_staleness_is_refused():
    job = Job(make_config(staleness=2), seed=1)
    job.start()
    job.post(job.machine.leave(1))
    job.workers[1] = Worker(1, make_config(staleness=1), incarnation=2)
    job.workers[1].join()
    with pytest.raises(FrameError, match="Worker 1 has staleness 1, where others have 2"):
        job.settle()


def test_what_a_step_dropped_goes_back_although_a_later_push_is_on_its_way():
    job = Job(make_config(((70,),), workers=2, push="threelc", pull="none", staleness=1), seed=2)
    job.start()
    first = [values.clone() for values in job.workers[0].values]
    job.train(3)
    for worker in job.workers:
        worker.push([torch.full((70,), 3e38)])
        worker.push(job.grads())
    job.settle()
    for worker in job.workers:
        worker.slots[0].apply(worker.values[0], 5)
    assert list(job.machine.rounds[0].counted) == [4, 4]
    assert list(job.machine.rounds[0].last_counted[0]) == [2, 4]
    assert all(float(np.abs(worker.slots[0].residual).max()) < 100 for worker in job.workers)
    moved = (first[0] - job.shard.parameters[0].detach()).abs().max()
    assert float(moved) < 100
