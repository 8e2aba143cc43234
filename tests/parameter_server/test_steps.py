"""Push and pull without a network: nothing is lost, nothing is counted twice, replicas are the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire.core.errors import FrameError
from gradwire.parameter_server.report import late_share
from gradwire.parameter_server.round import MAX_MISSES
from gradwire.parameter_server.shared_updates import SharedUpdates
from gradwire.parameter_server.update import push_context
from gradwire.wire.frame import FrameKind, Header
from tests.parameter_server.harness import LR, Job, Worker, make_config, tell


def assert_same(job: Job, workers=None) -> None:
    """Replicas hold the same bits, those that the server believes they have."""
    workers = job.workers if workers is None else workers
    for tensor in range(len(job.config.tensors)):
        for worker in workers:
            assert torch.equal(worker.values[tensor], job.shard.replicas[tensor]), (worker.number, tensor)


def assert_conserved(job: Job, first: list[torch.Tensor], lost: list[np.ndarray] | None = None) -> None:
    """What workers produced = what was applied + what they keep, wait for or lost + what died with a worker."""
    for tensor, before in enumerate(first):
        moved = (before.double() - job.shard.parameters[tensor].detach().double()).reshape(-1).numpy()
        applied = moved / LR * job.config.needed
        kept = sum(w.slots[tensor].residual for w in job.workers if w.slots[tensor].residual is not None)
        pending = sum(pushed_value(w, tensor, push) for w in job.workers for push in w.slots[tensor]._waiting)
        died = sum(w.slots[tensor].lost for w in job.workers) + (0.0 if lost is None else lost[tensor])
        produced = sum(w.produced[tensor] for w in job.workers)
        np.testing.assert_allclose(applied + kept + pending + died, produced, rtol=1e-3, atol=2e-3)


def pushed_value(worker: Worker, tensor: int, push) -> np.ndarray:
    """What of a worker's gradients is in a push that waits: its payload, and what that does not carry."""
    if push.payload is None or push.payload.nonfinite:
        return np.zeros(worker.produced[tensor].size) + (0.0 if push.taken is None else push.taken)
    ctx = push_context(worker.config, tensor, worker.number, push.header.round)
    sent = worker.slots[tensor].config.push_compressor.decode(push.payload, ctx).double().reshape(-1).numpy()
    return sent + (0.0 if push.left is None else push.left)


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
    for _ in range(3):
        for worker in job.workers:
            worker.begin()
            worker.push(job.grads())
        job.settle()
    for worker in job.workers:
        worker.begin()
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


def test_a_worker_that_returns_shares_the_updates_it_has_missed():
    job = Job(make_config(((700, 10), (5,)), workers=3, backups=1), seed=4)
    job.start()
    job.train(2)
    job.post(job.machine.leave(2))
    for _ in range(5):
        for worker in job.workers[:2]:
            worker.begin()
            worker.push(job.grads())
        job.settle()
    bodies = [body for _, body in job.machine.updates.since(0, 2)]
    assert len(bodies) == 5
    returned = job.workers[2]
    returned.join()
    job.deliver(returned)
    kinds = [[header.kind for header, _ in returned.inbox if header.tensor == tensor][-1] for tensor in range(2)]
    assert kinds == [FrameKind.DELTA, FrameKind.MODEL]  # five updates of five elements are more bytes
    received = [body for header, body in returned.inbox if header.kind is FrameKind.DELTA and header.tensor == 0]
    assert [each.tobytes() for each in received] == [each.tobytes() for each in bodies]
    job.settle()
    for worker in job.workers:
        for slot, values in zip(worker.slots, worker.values):
            slot.apply(values, slot.newest)
    assert_same(job)
    assert 2 * sum(each.nbytes for each in received) < job.shard.values(0).nbytes


@given(sizes=st.lists(st.integers(0, 40), max_size=30), max_bytes=st.integers(0, 100))
def test_kept_updates_are_consecutive_and_bounded(sizes, max_bytes):
    updates = SharedUpdates()
    for step, size in enumerate(sizes):
        updates.add((Header(FrameKind.DELTA, round=step), np.zeros(size, np.uint8)), max_bytes)
        assert updates.num_bytes(0) <= max_bytes
        for version in range(step + 1):
            found = updates.since(0, version)
            assert [header.round for header, _ in found] in ([], list(range(version, step + 1)))
            if sum(sizes[version : step + 1]) <= max_bytes:
                assert found
