"""Push and pull without a network: nothing is lost, nothing is counted twice, replicas are the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.parameter_server.report import late_share
from gradwire.parameter_server.round import MAX_MISSES
from tests.parameter_server.books import assert_conserved, assert_same
from tests.parameter_server.harness import LR, Job, Worker, make_config, tell


def test_without_compression_it_is_plain_training():
    job = Job(make_config(push="none", pull="none"))
    job.start()
    model = [torch.nn.Parameter(values.clone()) for values in job.workers[0].values]
    optimizer = torch.optim.SGD(model, lr=LR)
    for _ in range(5):
        grads = [job.grads() for _ in job.workers]
        for worker, own in zip(job.workers, grads):
            worker.begin()
            worker.push(own)
        job.settle()
        for parameter, own in zip(model, zip(*grads)):
            parameter.grad = sum(own) / 3
        optimizer.step()
    for worker in job.workers:
        worker.begin()
    for tensor, parameter in enumerate(model):
        torch.testing.assert_close(job.workers[2].values[tensor], parameter.detach(), rtol=1e-5, atol=1e-5)
    assert_same(job)


@pytest.mark.parametrize(
    ("push", "pull"),
    [
        ("threelc", "threelc"),
        ("threelc:sparsity=1.75", "none"),
        ("mqe1bit", "int8"),
        ("terngrad", "terngrad"),
        ("topk:ratio=0.25", "topk:ratio=0.25"),
    ],
)
def test_replicas_are_the_same_bits_and_nothing_is_lost(push, pull):
    unbiased = push == "terngrad"
    job = Job(make_config(push=push, pull=pull, feedback=not unbiased), seed=3)
    job.start()
    first = [values.clone() for values in job.workers[0].values]
    job.train(20)
    assert_same(job)
    if not unbiased:
        assert_conserved(job, first)


def test_the_error_of_a_pull_is_made_up_for():
    job = Job(make_config(((1000,),), push="none", pull="threelc"), seed=5)
    job.start()
    job.train(4)
    errors = []
    for _ in range(60):  # no gradients any more: what is left comes with later pulls
        for worker in job.workers:
            worker.begin()
            worker.push([torch.zeros(1000)])
        job.settle()
        errors.append(float((job.shard.parameters[0].detach() - job.shard.replicas[0]).norm()))
    assert errors[-1] < 1e-3 * errors[0]


def test_a_late_worker_keeps_its_gradient():
    job = Job(make_config(workers=3, backups=1), seed=1)
    job.start()
    first = [values.clone() for values in job.workers[0].values]
    for _ in range(4):
        for worker in job.workers[:2]:
            worker.begin()
            worker.push(job.grads())
        job.settle()
    for worker in job.workers[:2]:
        worker.begin()
    late = job.workers[2]
    late.begin()
    assert late.step == 3  # one behind the newest, which others may still work at
    late.push(job.grads())
    assert not late.outbox
    assert all(slot.residual is not None for slot in late.slots)
    assert_conserved(job, first)
    late.begin()
    late.push(job.grads())
    assert len(late.outbox) == 2
    assert_same(job, job.workers[:2])


def test_a_worker_that_missed_too_much_is_waited_for():
    job = Job(make_config(workers=3, backups=1), seed=1)
    job.start()
    for _ in range(MAX_MISSES):
        for worker in job.workers[:2]:
            worker.begin()
            worker.push(job.grads())
        job.settle()
    assert job.machine.rounds[0].version == MAX_MISSES
    for worker in job.workers[:2]:
        worker.begin()
        worker.push(job.grads())
    job.settle()
    assert job.machine.rounds[0].version == MAX_MISSES
    late = job.workers[2]
    for _ in range(2):  # its first gradient is late, the second one is not
        late.begin()
        late.push(job.grads())
        job.settle()
    assert job.machine.rounds[0].version == MAX_MISSES + 1
    assert job.machine.rounds[0].counted[2] == MAX_MISSES


def test_who_left_is_not_waited_for():
    job = Job(make_config(workers=3, backups=1), seed=1)
    job.start()
    for _ in range(MAX_MISSES + 1):
        for worker in job.workers[:2]:
            worker.begin()
            worker.push(job.grads())
        job.settle()
    assert job.machine.rounds[0].version == MAX_MISSES
    job.post(job.machine.leave(2))
    job.settle()
    assert job.machine.rounds[0].version == MAX_MISSES + 1


def test_a_parameter_that_nobody_used_is_left_alone():
    job = Job(make_config(), seed=2)
    job.start()
    before = job.shard.parameters[0].detach().clone()
    for worker in job.workers:
        worker.begin()
        worker.push([None, job.grads()[1]])
    job.settle()
    assert torch.equal(job.shard.parameters[0], before)
    assert 0 not in job.shard.optimizers  # no momentum or weight decay either
    assert job.machine.rounds[0].version == 1


def test_what_is_kept_back_of_a_parameter_waits_until_it_is_used():
    job = Job(make_config(), seed=2)
    job.start()
    first = [values.clone() for values in job.workers[0].values]
    job.train(3)
    kept = [worker.slots[0].residual.copy() for worker in job.workers]
    for worker in job.workers:
        worker.begin()
        worker.push([None, job.grads()[1]])
    job.settle()
    for worker, before in zip(job.workers, kept):
        worker.begin()
        np.testing.assert_array_equal(worker.slots[0].residual, before)
    assert_conserved(job, first)
    job.train(1)
    assert_conserved(job, first)


def test_a_returning_worker_gets_the_model_as_the_others_see_it():
    job = Job(make_config(pull="threelc:sparsity=1.75"), seed=4)
    job.start()
    job.train(5)
    job.post(job.machine.leave(1))
    job.workers[1] = Worker(1, job.config, incarnation=2, seed=99)
    job.workers[1].join()
    job.settle()
    job.workers[1].begin()
    assert_same(job)
    assert not torch.equal(job.shard.parameters[0], job.shard.replicas[0])
    job.train(5)
    assert_same(job)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_worker_that_returns_does_not_change_the_rate_of_open_steps(restarted):
    job = Job(make_config(push="none", pull="none", workers=2), seed=4)
    job.start()
    before = [values.clone() for values in job.workers[0].values]
    grads = [job.grads(), job.grads()]
    job.workers[0].push(grads[0])
    job.settle()
    job.post(job.machine.leave(0))
    if restarted:
        job.workers[0] = Worker(0, job.config, incarnation=2)
    job.workers[0].join(({"lr": 9.0},))
    job.settle()
    tell(job, 0, ({"lr": 5.0},))  # of the next step
    job.workers[1].push(grads[1])
    job.settle()
    for tensor in range(2):
        mean = (grads[0][tensor] + grads[1][tensor]) / 2
        torch.testing.assert_close(job.shard.parameters[tensor].detach(), before[tensor] - LR * mean)


def test_a_late_gradient_is_lost_and_counted_if_the_job_says_so():
    job = Job(make_config(workers=3, backups=1, late="drop"), seed=1)
    job.start()
    first = [values.clone() for values in job.workers[0].values]
    late = job.workers[2]
    late.push(job.grads())  # it is under way when the step is closed
    for worker in job.workers[:2]:
        worker.push(job.grads())
        while worker.outbox:
            job.deliver(worker)
    job.settle()
    late.begin()
    for worker in job.workers[:2]:
        worker.begin()
        worker.push(job.grads())
    job.settle()
    kept = [slot.residual.copy() for slot in late.slots]
    late.push(job.grads())  # and this one is not even sent
    assert not late.outbox
    for slot, before in zip(late.slots, kept):
        assert (slot.num_gradients, slot.num_late) == (2, 2)
        np.testing.assert_array_equal(slot.residual, before)
    assert late_share(late.slots) == 1.0
    for worker in job.workers[:2]:
        worker.begin()
        assert late_share(worker.slots) == 0.0
    assert_conserved(job, first)
