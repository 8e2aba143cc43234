"""List schedule of a step: the routes of many tensors during backward, on one rank's link and codec.

It follows the engine. Tensors start when backward has computed them. The codec takes the ready task of the tensor that
was submitted first, and the link sends messages in the order in which they are ready. All ranks are equal: what a rank
waits for arrives when the rank sends the same itself. A tensor with fewer partitions than ranks takes the time of a
rank that owns one, and occupies codec and link for the mean over all ranks.

The messages of a leg are grouped into a few tasks, so that thousands of ranks cost no more than four. The simulator
runs the graphs themselves, message by message.

Source: HiPress (SOSP 2021), sections 3.1 and 3.3. Differences: the paper plans each tensor separately.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradwire.planner.closed_forms import Leg, Route
from gradwire.planner.event_loop import CODEC, LINK, TASK, run_tasks

# Half of these suffice for more than MANY tensors, where other tensors fill the gaps.
MAX_LEG_TASKS = 4  # tasks of one kind per leg; more messages are grouped
MAX_BATCHES = 8  # of partitions, per tensor; more are grouped
MANY = 32


class ScheduledTensor(NamedTuple):
    """One tensor (or batch of small ones): when its gradient is ready, and its route."""

    ready: float
    route: Route


@dataclass(frozen=True)
class Schedule:
    """Result of a schedule, in seconds.

    Attributes:
        finish: Time from the start of backward to the last mean.
        codec: Total time of the codec.
        link: Total time of the link.
    """

    finish: float
    codec: float
    link: float


class TaskGraph(NamedTuple):
    """Tasks of one batch of partitions; see `event_loop.run_tasks`.

    Attributes:
        tasks: Elements of type `event_loop.TASK`, [T].
        dependents: Distances from each task to those that wait for it, int64[D].
    """

    tasks: np.ndarray
    dependents: np.ndarray


# Whole tasks, for `np.concatenate`: it would compare the fields of each array, which takes longer than to copy them.
_OPAQUE = np.dtype((np.void, TASK.itemsize))
_NOTHING = TaskGraph(np.empty(0, TASK), np.empty(0, np.int64))


def run(jobs: Iterable[ScheduledTensor]) -> Schedule:
    """Schedule jobs in the order of their submission."""
    batches = list(batches_of(jobs))
    graphs = [_NOTHING, *(graph for _, graph in batches)]
    tasks = np.concatenate([graph.tasks.view(_OPAQUE) for graph in graphs]).view(TASK)
    dependents = np.concatenate([graph.dependents for graph in graphs])
    sizes = np.array([graph.tasks.size for _, graph in batches], np.int64)
    ready = np.array([ready for ready, _ in batches], np.float64)
    return Schedule(*run_tasks(tasks, dependents, sizes, ready))


def batches_of(jobs: Iterable[ScheduledTensor]) -> Iterable[tuple[float, TaskGraph]]:
    """Yield the batches of partitions of all jobs: when each is ready, and its tasks."""
    jobs = list(jobs)
    divisor = 1 if len(jobs) <= MANY else 2
    for job in jobs:
        count = min(job.route.batches, MAX_BATCHES // divisor)
        graph = _graph(job.route, count, MAX_LEG_TASKS // divisor)
        for _ in range(count):
            yield job.ready, graph


@functools.lru_cache(maxsize=1 << 14)
def _graph(route: Route, batches: int, most: int) -> TaskGraph:
    """Return the tasks of one of `batches` batches. Each leg waits for the whole leg before it."""
    draft, last = _Draft(), list[int]()
    for leg in route.legs:
        last = _add_leg(draft, leg, route.batches / batches, most, last, route.load)
    return draft.graph()


class _Draft:
    """Tasks of a batch as they are added. A task is known by its index."""

    def __init__(self) -> None:
        self._tasks: list[tuple[int, float, float, int]] = []
        self._dependents: list[list[int]] = []

    def add(self, resource: int, seconds: float, after: Sequence[int], lag: float = 0.0) -> int:
        index = len(self._tasks)
        self._tasks.append((resource, seconds, lag, len(after)))
        self._dependents.append([])
        for earlier in after:
            self._dependents[earlier].append(index - earlier)
        return index

    def graph(self) -> TaskGraph:
        tasks = [(*task, len(found)) for task, found in zip(self._tasks, self._dependents)]
        return TaskGraph(np.array(tasks, TASK), np.fromiter(itertools.chain(*self._dependents), np.int64))


def _add_leg(draft: _Draft, leg: Leg, scale: float, most: int, after: list[int], load: float) -> list[int]:
    """Add the tasks of a leg. Return those that the next leg waits for."""
    if leg.by_all:
        scale, load = load * scale, 1.0
    idle = 1 - load  # share of a rank's time in which it only waits for others
    if leg.kind == "work":
        return [draft.add(CODEC, load * leg.coding * scale, after, idle * leg.coding * scale)]
    ends: list[int] = []
    count = min(leg.messages, most if leg.kind == "fan" else most // 2)
    share = scale * leg.messages / count
    # Messages that are encoded, or decoded, one after another although other ranks do it.
    encoded, decoded = share if leg.kind != "fan" else scale, share if leg.kind == "chain" else scale
    latency = leg.latency * (1 if leg.kind == "fan" else leg.messages / count)
    before = after
    for index in range(count):
        earlier = (index + 1) * share if leg.kind == "fan" else share  # messages one after another on an owner's link
        encode = draft.add(CODEC, load * leg.encode * share, before, idle * leg.encode * encoded)
        send = draft.add(LINK, load * leg.wire * share, [encode], latency + idle * leg.wire * earlier)
        decode = draft.add(CODEC, load * leg.decode * share, [send], idle * leg.decode * decoded)
        if leg.kind == "relay":
            before = [send]
            ends.append(decode)
        elif leg.kind == "chain":
            before = ends = [decode]
        else:
            ends.append(decode)
        if index == 0 and leg.aside:  # not before the first message is on its way
            aside = draft.add(CODEC, load * leg.aside * scale, after, idle * leg.aside * scale)
            ends = [*ends, aside]
    return ends
