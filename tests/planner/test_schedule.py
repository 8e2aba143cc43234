"""The step schedule: bounds that any schedule obeys, and agreement with the simulator for whole models."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planner.closed_forms import FORMS, Route, route
from gradwire.planner.event_loop import CODEC, LINK
from gradwire.planner.schedule import MANY, Schedule, ScheduledTensor, batches_of, run
from gradwire.simulate import Cluster, Compute, SimulatedGradient, SimulatedLink, SimulatedModel, models, step
from gradwire.sync.plan import Plan
from tests.planner.machines import SPECS, any_costs, costs

tensors = st.tuples(
    st.floats(0, 0.1), st.sampled_from(SPECS), st.sampled_from(sorted(FORMS)), st.integers(1, 12), st.integers(1, 10**7)
)


def reference(jobs: list[ScheduledTensor]) -> Schedule:
    """The event loop with lists in place of heaps: what is first is found by `min`."""
    tasks, after, batches = [], [], []  # all tasks, those that wait for each, the number of its batch
    for batch, (ready, graph) in enumerate(batches_of(jobs)):
        distances = iter(graph.dependents.tolist())
        for task in graph.tasks:
            after.append([len(tasks) + next(distances) for _ in range(task["num_dependents"])])
            tasks.append([*task.tolist()[:4], ready])
            batches.append(batch)
    numbers = itertools.count()
    events = [(task[4], next(numbers), False, index) for index, task in enumerate(tasks) if task[3] == 0]
    queued, running, busy, finish = [], set(), [0.0, 0.0], 0.0
    while events:
        now, _, has_ended, index = event = min(events)
        events.remove(event)
        resource, _, lag, _, _ = tasks[index]
        if has_ended:
            running.remove(resource)
            finish = max(finish, now + lag)
            for following in after[index]:
                tasks[following][3] -= 1
                if tasks[following][3] == 0:
                    events.append((now + lag, next(numbers), False, following))
        else:
            queued.append((batches[index] if resource == CODEC else 0, next(numbers), index))
        for resource in (CODEC, LINK):
            waiting = [each for each in queued if tasks[each[2]][0] == resource]
            if waiting and resource not in running and all(event[0] > now for event in events):
                queued.remove(min(waiting))
                running.add(resource)
                seconds = tasks[min(waiting)[2]][1]
                busy[resource] += seconds
                events.append((now + seconds, next(numbers), True, min(waiting)[2]))
    return Schedule(finish, busy[CODEC], busy[LINK])


@given(any_costs, st.lists(tensors, max_size=6), st.integers(1, 20))
def test_the_compiled_event_loop_is_the_obvious_one_to_the_bit(job, drawn, repeated):
    """Equal tensors make events of equal times, whose order counts; more than MANY have fewer tasks each."""
    routes = [(ready, route(spec, strategy, K, numel, job)) for ready, spec, strategy, K, numel in drawn]
    jobs = [ScheduledTensor(*each) for each in routes] * repeated
    assert run(jobs) == reference(jobs)


@given(any_costs, st.lists(tensors, max_size=6))
def test_a_schedule_is_never_shorter_than_its_work_nor_longer_than_all_in_a_row(job, drawn):
    jobs = [ScheduledTensor(ready, route(spec, strategy, K, numel, job)) for ready, spec, strategy, K, numel in drawn]
    found = run(sorted(jobs, key=lambda job: job.ready))
    assert found.codec == pytest.approx(sum(way.encode + way.decode for _, way in jobs))
    assert found.link == pytest.approx(sum(way.wire for _, way in jobs))
    latest = max((ready for ready, _ in jobs), default=0.0)
    waiting = sum(way.batches * leg.waiting for _, way in jobs for leg in way.legs)
    waiting += sum((way.encode + way.decode + way.wire) * (1 / way.load - 1) for _, way in jobs if way.legs)
    assert max(latest, found.codec, found.link) * (1 - 1e-9) <= found.finish
    assert found.finish <= (latest + found.codec + found.link + waiting) * (1 + 1e-9)


@given(any_costs, st.sampled_from(SPECS), st.sampled_from(sorted(FORMS)), st.integers(1, 10**7), st.booleans())
def test_one_tensor_alone_takes_what_its_form_says(job, spec, strategy, numel, whole):
    way = route(spec, strategy, 1 if whole or strategy == "allgather" else job.world_size, numel, job)
    assert run([ScheduledTensor(0.5, way)]).finish - 0.5 == pytest.approx(way.seconds, rel=0.5)


def test_link_and_codec_work_side_by_side():
    way = route("bit", "scatter_reduce", 4, 10**6, costs(rate=1e9))
    ten = run([ScheduledTensor(0.0, way)] * 10)
    assert ten.finish < 0.8 * 10 * way.seconds
    assert ten.finish >= max(ten.codec, ten.link)


def test_tensors_with_different_owners_do_not_wait_for_each_other():
    way = route("none", "scatter_reduce", 1, 10**6, costs(rate=1e9))
    four = run([ScheduledTensor(0.0, way)] * 4).finish
    assert four < 1.5 * way.seconds
    assert run([ScheduledTensor(0.0, way)] * 16).finish == pytest.approx(4 * way.seconds, rel=0.3)


def test_what_is_ready_early_hides_behind_what_is_late():
    way = route("none", "ring", 4, 10**6, costs())
    alone = run([ScheduledTensor(1.0, way)]).finish
    assert run([ScheduledTensor(0.0, way), ScheduledTensor(1.0, way)]).finish == pytest.approx(alone)


def test_nothing_takes_no_time():
    assert run([]).finish == 0
    assert run([ScheduledTensor(1.0, Route(()))]).finish == 0


@pytest.mark.parametrize(
    ("name", "spec", "strategy"), [("lstm", "onebit", "scatter_reduce"), ("vgg19", "none", "ring")]
)
def test_whole_models_agree_with_the_simulator(name, spec, strategy):
    names = {"none": "none", "onebit": "bit"}
    backward = 0.2
    for rate in (1e8, 1e9, 1e10):
        job = costs(4, rate)
        job = replace(job, codecs={name: job.codecs[kind] for name, kind in names.items()})
        large = [(tensor, share) for tensor, share in models.get(name).backward() if len(tensor.shape) > 1]
        assert len(large) <= MANY
        given = [SimulatedGradient(tensor.name, tensor.shape, share * backward) for tensor, share in large]
        cluster = Cluster(4, SimulatedLink(rate, 1e-4, header_bytes=0))
        plan = Plan({"*.weight*": spec, "*": "none"}, strategy=strategy)
        found = step(SimulatedModel(given, Compute(backward_seconds=backward)), plan, cluster, job).seconds
        jobs = [ScheduledTensor(grad.ready_seconds, route(spec, strategy, 4, grad.spec.numel, job)) for grad in given]
        assert max(backward, run(jobs).finish) == pytest.approx(found, rel=0.1)
