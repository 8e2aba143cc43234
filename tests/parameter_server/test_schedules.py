"""Any order of frames, breaks, deaths and returns: the books are right in the end."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parameter_server.books import assert_conserved, assert_same, pushed_value
from tests.parameter_server.harness import Job, Worker, make_config


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 20),
    backups=st.integers(0, 1),
    staleness=st.integers(0, 3),
    late=st.sampled_from(["keep", "drop"]),
    actions=st.lists(st.integers(0, 9), max_size=150),
)
def test_any_schedule_conserves_gradients(seed, backups, staleness, late, actions):
    """Connections break, workers die and come back, frames arrive whenever: the books are right in the end."""
    job = Job(make_config(((7,), (2, 3)), workers=3, backups=backups, staleness=staleness, late=late), seed)
    job.start()
    first = [values.clone() for values in job.workers[0].values]
    lost = [np.zeros(values.numel()) for values in first]
    seen: dict[tuple[int, int], bytes] = {}
    for action in actions:
        worker = job.workers[action % 3]
        if action < 6:  # the usual thing: a frame or two, and the next step once it can begin
            if worker.inbox:
                worker.take()
            if worker.outbox:
                job.deliver(worker)
            if worker.ready and worker.welcome is not None and not worker.inbox and idle(worker):
                worker.begin()
                worker.push(job.grads(unused=0.3))
                assert_bounded(job)
                assert_one_model_per_version(worker, seen)
        elif action < 9:  # its connection breaks and it connects again
            job.post(job.machine.leave(worker.number))
            worker.join()
        else:  # it is killed, with what it kept back, and a new process takes its place
            number = job.random.randrange(3)
            worker = job.workers[number]
            job.post(job.machine.leave(number))
            fresh = Worker(number, job.config, worker.incarnation + 1, seed=job.random.randrange(1 << 20))
            bury(worker, job, lost)
            fresh.produced = worker.produced
            for slot, before in zip(fresh.slots, worker.slots):
                slot.lost = before.lost
            job.workers[number] = fresh
            fresh.join()
    for worker in job.workers:  # let all come to rest
        job.post(job.machine.leave(worker.number))
        worker.join()
    job.settle()
    for _ in range(3):
        for worker in job.workers:
            if worker.ready and idle(worker):
                worker.begin()
                worker.push(job.grads(unused=0.3))
        job.settle()
    for worker in job.workers:
        for slot, values in zip(worker.slots, worker.values):
            slot.apply(values, slot.newest)
    assert_same(job)
    assert_conserved(job, first, lost)


def assert_bounded(job: Job) -> None:
    """No worker is further ahead of an open step than the staleness, in what it has pushed or computes with."""
    for worker in job.workers:
        for slot, round_ in zip(worker.slots, job.machine.rounds):
            assert worker.step - 1 - slot.version <= job.config.staleness
            assert worker.step - 1 - round_.version <= job.config.staleness
            assert len(slot.unanswered()) <= job.config.staleness + 1
    assert all(len(round_.waiting) <= job.config.staleness + 1 for round_ in job.machine.rounds)


def assert_one_model_per_version(worker: Worker, seen: dict[tuple[int, int], bytes]) -> None:
    """Whoever has a version of a parameter has the same bits, whenever and however it came to it."""
    for slot, values in zip(worker.slots, worker.values):
        key = slot.tensor, slot.version
        assert seen.setdefault(key, values.numpy().tobytes()) == values.numpy().tobytes(), key


def idle(worker: Worker) -> bool:
    """Whether enough of its pushes will be settled by the time it begins."""
    step = worker.next_step
    return all(frame[0].round < step for slot in worker.slots for frame in slot.unanswered())


def bury(worker: Worker, job: Job, lost: list[np.ndarray]) -> None:
    """What dies with a worker: its residual, and a push that the server will never have."""
    for tensor, slot in enumerate(worker.slots):
        if slot.residual is not None:
            lost[tensor] += slot.residual
        round_ = job.machine.rounds[tensor]
        for push in slot._waiting:
            step = push.header.round
            known = round_.has(worker.number, step) or step in round_.last_counted[worker.number]
            if not known or push.payload is None:
                lost[tensor] += pushed_value(worker, tensor, push)
            elif push.left is not None:  # its payload lives on; what the payload does not carry dies
                lost[tensor] += push.left
