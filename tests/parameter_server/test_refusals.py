"""What a server of parameters refuses, whom it turns away for it, and that the others go on."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gradwire.core.errors import FrameError
from gradwire.parameter_server.session import TrainingJoin
from gradwire.parameter_server.shard import ParameterShard
from gradwire.wire.frame import FrameFlags, FrameKind, Header
from tests.parameter_server.harness import EPOCH, GROUPS, Job, Worker, make_config, tell

DEEP: object = 0
for _ in range(450):
    DEEP = [DEEP]


def test_an_older_process_of_a_worker_is_rejected():
    job = Job(make_config(), seed=4)
    job.start()
    zombie = job.workers[1]
    for incarnation in (7, 3):  # numbers say nothing about age
        job.post(job.machine.leave(1))
        job.workers[1] = Worker(1, job.config, incarnation)
        job.workers[1].join()
        job.settle()
        job.post(job.machine.leave(1))
        job.workers[1].join()  # again, over a new connection
        job.settle()
        job.post(job.machine.leave(1))
        zombie.join()
        with pytest.raises(FrameError, match="has been replaced"):
            job.deliver(zombie)


def other_job(worker: int) -> Worker:
    """A worker that joins with another model."""
    other = Worker(worker, make_config(push="onebit"), incarnation=99)
    other.join(({"lr": 0.1}, {"lr": 0.2}))
    return other


def test_a_worker_of_another_job_is_refused_and_ends_nobodys():
    job = Job(make_config())
    job.start()
    job.train(1)
    job.post(job.machine.leave(2))
    with pytest.raises(FrameError, match=r"Worker 2 has parameter .*onebit.* where others have .*threelc"):
        job.deliver(other_job(2))
    stranger = Worker(2, make_config(workers=4))
    stranger.join()
    with pytest.raises(FrameError, match="Worker 2 expects 4 workers, but this server was started for 3"):
        job.deliver(stranger)
    job.workers[2].join()
    job.settle()
    job.train(2)
    assert job.machine.rounds[0].version == 3


@pytest.mark.parametrize("lost", [False, True])
def test_the_model_is_that_of_worker_0_whoever_comes_first(lost):
    job = Job(make_config())
    if lost:  # an earlier worker 0 had another model, and was lost before it had sent its values
        job.deliver(other_job(0))
        job.machine.leave(0)
    else:
        job.deliver(other_job(2))
        assert job.machine.config is None
    for worker in job.workers[:2]:
        worker.join()
    job.settle()
    assert job.machine.config == job.config
    if not lost:
        assert "onebit" in job.machine.rejected.pop(2)
        assert job.machine.present == {0, 1}
    job.workers[2].join()
    job.settle()
    for worker in job.workers:
        worker.begin()
    job.train(2)
    assert job.machine.rounds[0].version == 2


def test_a_worker_that_is_ahead_of_a_server_without_state_is_refused():
    job = Job(make_config())
    job.start()
    job.train(1)
    fresh = Job(make_config())
    job.workers[2].join()
    with pytest.raises(FrameError, match="older state"):
        fresh.deliver(job.workers[2])


def test_a_server_with_an_older_state_is_found_out():
    job = Job(make_config())
    job.start()
    job.train(2)
    fresh = Job(make_config())
    worker = job.workers[0]
    worker.join()
    fresh.workers[0] = worker
    with pytest.raises(FrameError, match="older state"):
        fresh.deliver(worker)


def test_a_push_that_does_not_decode_costs_its_sender_alone():
    job = Job(make_config(((70,),)), seed=6)
    job.start()
    for worker in job.workers:
        worker.begin()
        worker.push(job.grads())
    header, body = job.workers[1].outbox.popleft()
    bad = body.copy()
    bad[:4] = 255
    job.machine.admit(1, header)
    job.post(job.machine.receive(1, header, bad))
    job.settle()
    assert list(job.machine.rejected) == [1]
    assert job.machine.rounds[0].version == 0
    job.post(job.machine.leave(1))
    job.workers[1].join()  # and pushes again what has not been answered
    job.settle()
    assert job.machine.rounds[0].version == 1


@pytest.mark.parametrize(
    "change",
    [{"sender": 2}, {"epoch": 8}, {"tensor": 2}, {"stage": 1}, {"count": 3}, {"compressor": 1}, {"dtype": 2},
     {"kind": FrameKind.STATS}, {"kind": FrameKind.DELTA}, {"length": 1 << 20}, {"offset": 1}, {"partition": 1}],
)  # fmt: skip
def test_a_header_that_is_not_due_is_refused(change):
    job = Job(make_config())
    job.start()
    job.workers[1].begin()
    job.workers[1].push(job.grads())
    header, body = job.workers[1].outbox[0]
    fields = {name: getattr(header, name) for name in header.__slots__}
    job.machine.admit(1, header)
    with pytest.raises(FrameError):
        job.machine.admit(1, Header(**{**fields, "length": body.nbytes, **change}))


def test_a_push_ahead_of_its_step_is_refused():
    job = Job(make_config())
    job.start()
    header = Header(FrameKind.PAYLOAD, flags=FrameFlags.PRESENT, sender=1, epoch=EPOCH, round=1)
    with pytest.raises(FrameError, match="at most"):
        job.machine.receive(1, header, np.empty(0, np.uint8))


def test_a_payload_of_a_parameter_that_was_not_used_is_refused():
    job = Job(make_config())
    job.start()
    job.workers[1].push(job.grads())
    header, body = job.workers[1].outbox[0]
    with pytest.raises(FrameError):
        job.machine.admit(1, replace(header, flags=FrameFlags.PRESENT, length=body.nbytes))


@pytest.mark.parametrize(
    "groups",
    [[{"lr": DEEP}], [{"lr": "x"}], [{"lr": 0.1, "params": []}], [{"params": 5}], [{"lr": [0.1]}],
     [{"weight_decay": "x"}], [{"lr": 10**400}], [{"lr": math.nan}], [{"lr": math.inf}],
     [{"lr": 0.1, "weight_decay": math.nan}]],
)  # fmt: skip
def test_hyperparameters_that_are_none_cost_their_sender_alone(groups):
    job = Job(make_config())
    job.start()
    body = np.frombuffer(json.dumps(groups).encode(), np.uint8)
    header = Header(FrameKind.GROUPS, sender=0, epoch=EPOCH, length=body.nbytes)
    job.machine.admit(0, header)
    with pytest.raises(FrameError):
        job.machine.receive(0, header, body)
    job.train(2)
    assert job.machine.rounds[0].version == 2


def test_hyperparameters_that_the_optimizer_cannot_change_are_refused():
    job = Job(make_config(optimizer="Adam"))
    job.start()
    job.train(1)
    with pytest.raises(FrameError, match="Adam does not take"):
        tell(job, 0, ({"lr": 0.1, "amsgrad": True},))
    tell(job, 0, ({"lr": 0.1, "betas": [0.5, 0.9], "initial_lr": 0.1},))
    job.train(1)


@pytest.mark.parametrize(
    "wrong", [{"push": "threelc:sparsity=" + "-" * 3000}, {"pull": "a" * 300}, {"shape": [-1, -1]}, {"shape": [-1]},
              {"shape": [0, 1 << 60]}, {"shape": [1] * 17}, {"name": DEEP}],
)  # fmt: skip
def test_configurations_that_are_none_are_refused(wrong):
    said = json.loads(TrainingJoin(make_config(), GROUPS, 1).to_bytes())
    said["agreement"]["tensors"][0] |= wrong
    with pytest.raises(FrameError):
        TrainingJoin.from_bytes(json.dumps(said).encode())


class Counting(torch.optim.SGD):
    """Counts its steps in its group, as schedule-free optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


class Remembering(torch.optim.SGD):
    """Keeps a list of tensors."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("history", []).append(parameter.grad.clone())


@pytest.mark.parametrize(("kind", "group", "said"), [
    (Counting, {"lr": 0.1, "k": 0}, "it changes 'k' of its group in a step"),
    (Remembering, {"lr": 0.1}, "JSON"),
])  # fmt: skip
def test_an_optimizer_whose_state_would_be_lost_is_refused(kind, group, said):
    name = f"{__name__}.{kind.__name__}"
    shard = ParameterShard((name,))
    with pytest.raises(FrameError, match=said):
        shard.check(make_config(optimizer=name), (group,))


def test_hyperparameters_are_checked_for_each_optimizer():
    """A worker that has left may have brought the same ones for another."""
    shard = ParameterShard()
    shard.check(make_config(), GROUPS)
    with pytest.raises(FrameError, match="--optimizer"):
        shard.check(make_config(optimizer="my.module.SGD"), GROUPS)


def test_a_worker_that_comes_again_before_the_model_brings_its_groups():
    """It was corrected, and has more of them now."""
    job = Job(make_config())
    job.workers[1].join()
    job.settle()
    job.post(job.machine.leave(1))
    groups = (*GROUPS, *GROUPS)
    for number in range(3):
        job.workers[number] = Worker(number, job.config, incarnation=10 + number)
        job.workers[number].join(groups)
    job.settle()
    for worker in job.workers:
        worker.begin()
    tell(job, 1, groups)
    job.train(1)


def test_an_optimizer_that_is_none_costs_its_sender_alone():
    job = Job(make_config())
    stranger = Worker(0, make_config(optimizer="LBFGS"))
    stranger.join()
    header, body = stranger.outbox.popleft()
    with pytest.raises(FrameError, match="--optimizer"):
        job.machine.receive(0, header, body)
    job.start()
    job.train(1)


def test_a_second_join_of_a_connection_is_refused():
    job = Job(make_config())
    job.start()
    job.workers[1].join()
    with pytest.raises(FrameError, match="one JOIN"):
        job.settle()
