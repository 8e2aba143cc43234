"""Gradients and steps that are not finite, or that overflow, leave no trace on server and workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.parameter_server.books import assert_same
from tests.parameter_server.harness import Job, Worker, make_config


@pytest.mark.parametrize("shape", [(70,), (), (1,), (9, 4)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("push", ["threelc", "none", "qsgd"])
def test_a_gradient_that_is_not_finite_is_counted_by_nobody_and_kept_nowhere(shape, value, push):
    job = Job(make_config((shape, (3, 5), (0, 4)), push=push, feedback=push == "threelc"), seed=2)
    job.start()
    job.train(3)
    before = job.workers[1].slots[0].residual
    for worker in job.workers:
        grads = job.grads()
        if worker.number == 1:
            grads[0].view(-1)[-1] = value
            grads[0] = grads[0].t().contiguous().t() if len(shape) == 2 else grads[0]  # another memory layout
        worker.push(grads)
    job.settle()
    for worker in job.workers:
        worker.begin()
    assert_same(job)
    assert torch.isfinite(job.shard.parameters[0]).all()
    after = job.workers[1].slots[0].residual
    assert after is before is None or np.array_equal(after, before)
    assert list(job.machine.rounds[0].counted) == [3, 2, 3]
    assert list(job.machine.rounds[1].counted) == [3, 3, 3]
    job.train(1)
    assert_same(job)
    assert list(job.machine.rounds[0].counted) == [4, 4, 4]


@pytest.mark.parametrize("value", [0.0, 1e-42, 0.1, 1e38])
def test_zeros_denormals_and_constants_are_counted(value):
    job = Job(make_config(((70,), (), (1,), (0, 4))), seed=2)
    job.start()
    for worker in job.workers:
        worker.push([torch.full(parameter.shape, value) for parameter in job.config.tensors])
    job.settle()
    for worker in job.workers:
        worker.begin()
    assert_same(job)
    for parameter, round_ in zip(job.shard.parameters.values(), job.machine.rounds):
        assert torch.isfinite(parameter).all() and list(round_.counted) == [0, 0, 0]


@pytest.mark.parametrize("push", ["none", "threelc"])
@pytest.mark.parametrize("returns", [False, True], ids=["stays", "returns"])
def test_a_step_of_finite_gradients_with_an_infinite_sum_is_dropped(push, returns):
    job = Job(make_config(workers=2, push=push, pull="none", feedback=push == "threelc"), seed=2)
    job.start()
    job.train(3)
    before = [parameter.detach().clone() for parameter in job.shard.parameters.values()]
    residuals = [[slot.residual for slot in worker.slots] for worker in job.workers]
    for worker in job.workers:
        huge, usual = job.grads()
        huge[3] = -3e38
        worker.push([huge, usual])
    for worker in job.workers:
        while worker.outbox:
            job.deliver(worker)
    if returns:  # without having heard of the step
        job.post(job.machine.leave(1))
        job.workers[1].join()
    job.settle()
    for worker in job.workers:
        worker.begin()
    assert_same(job)
    assert torch.equal(job.shard.parameters[0].detach(), before[0])
    assert not torch.equal(job.shard.parameters[1].detach(), before[1])
    assert list(job.machine.rounds[0].counted) == [2, 2]
    for worker, kept in zip(job.workers, residuals):
        assert worker.slots[0].unanswered() == []
        if kept[0] is None:
            assert worker.slots[0].residual is None
        else:
            np.testing.assert_array_equal(worker.slots[0].residual, kept[0])
    job.train(2)
    assert_same(job)
    assert torch.isfinite(job.shard.parameters[0]).all()
    assert list(job.machine.rounds[0].counted) == [5, 5]


def test_a_late_worker_keeps_its_gradient_where_the_step_was_dropped():
    job = Job(make_config(((70,),), backups=1, push="none", pull="none", feedback=False), seed=2)
    job.start()
    for worker in job.workers:
        worker.push([torch.full((70,), 3e38 if worker.number < 2 else 1.0)])
    for worker in job.workers:
        job.deliver(worker)
    job.settle()
    for worker in job.workers:
        worker.begin()
    assert list(job.machine.rounds[0].counted) == [-1, -1, -1]
    assert [worker.slots[0].residual is None for worker in job.workers] == [True, True, False]
    np.testing.assert_array_equal(job.workers[2].slots[0].residual, np.ones(70, np.float32))


@pytest.mark.parametrize("first", [True, False], ids=["the first step", "a later step"])
@pytest.mark.parametrize(
    ("optimizer", "pull", "value"),
    [("Adam", "none", 1e30), ("SGD", "fp16", 1e6), ("Adam", "threelc", 3e38), ("Adagrad", "fp16", -1e25)],
    ids=["the square", "the change", "both", "the square of a negative one"],
)
def test_a_finite_average_whose_step_overflows_is_dropped(first, optimizer, pull, value):
    """Server and workers go on as a job that never saw it: parameters, replicas and the state of the optimizer."""

    def run(poisoned: bool) -> list[torch.Tensor]:
        job = Job(make_config(((70,),), workers=2, push="none", pull=pull, feedback=False, optimizer=optimizer))
        job.start()
        for step in range(4):
            grads = [job.grads()[0] for _ in job.workers]
            is_bad = step == (0 if first else 2)
            if is_bad and not poisoned:
                continue
            if is_bad:
                grads[1][3] = value
            for worker, grad in zip(job.workers, grads):
                worker.push([grad])
            job.settle()
            for worker in job.workers:
                worker.begin()
            assert_same(job)
            if poisoned:
                assert (list(job.machine.rounds[0].counted) == [step, step]) != is_bad
        state = job.shard.optimizers[0].state_dict()["state"][0] if optimizer != "SGD" else {}
        return [job.shard.parameters[0].detach(), job.shard.replicas[0], *map(torch.as_tensor, state.values())]

    found, expected = run(True), run(False)
    assert len(found) == len(expected)
    assert all(torch.equal(left, right) and bool(left.isfinite().all()) for left, right in zip(found, expected))


def test_what_late_gradients_add_up_to_is_kept_while_it_is_finite():
    slot = Worker(0, make_config()).slots[0]
    for _ in range(2):
        slot._add_to_residual(torch.full((70,), 3e38))
    np.testing.assert_array_equal(slot.residual, np.full(70, 3e38, np.float32))
