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

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.planner.closed_forms import Leg, Route

CODEC, LINK = 0, 1
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


class _Task:
    __slots__ = ("dependents", "lag", "pending", "priority", "resource", "seconds")

    def __init__(self, resource: int, seconds: float, after: Sequence[_Task], lag: float = 0.0) -> None:
        self.resource = resource
        self.seconds = seconds
        self.lag = lag  # from when the resource is free again to the tasks that wait for it
        self.dependents: list[_Task] = []
        self.pending = len(after)
        self.priority = 0
        for task in after:
            task.dependents.append(self)


def run(jobs: Iterable[ScheduledTensor]) -> Schedule:
    """Schedule jobs in the order of their submission."""
    jobs = list(jobs)
    divisor = 1 if len(jobs) <= MANY else 2
    loop = _Loop()
    for job in jobs:
        route = job.route
        batches = min(route.batches, MAX_BATCHES // divisor)
        for _ in range(batches):
            tasks = _tasks(route.legs, route.batches / batches, MAX_LEG_TASKS // divisor, route.load)
            loop.submit(job.ready, tasks)
    return loop.run()


def _tasks(legs: Sequence[Leg], scale: float, most: int, load: float) -> list[_Task]:
    """Return the tasks of one batch. Each leg waits for the whole leg before it."""
    found: list[_Task] = []
    last: list[_Task] = []
    for leg in legs:
        made, last = _leg_tasks(leg, scale, most, last, load)
        found += made
    return found


def _leg_tasks(leg: Leg, scale: float, most: int, after: list[_Task], load: float) -> tuple[list[_Task], list[_Task]]:
    """Return the tasks of a leg, and those that the next leg waits for."""
    idle = 1 - load  # share of a rank's time in which it only waits for others
    if leg.kind == "work":
        work = _Task(CODEC, load * leg.coding * scale, after, idle * leg.coding * scale)
        return [work], [work]
    found: list[_Task] = []
    ends: list[_Task] = []
    count = min(leg.messages, most if leg.kind == "fan" else most // 2)
    share = scale * leg.messages / count
    # Messages that are encoded, or decoded, one after another although other ranks do it.
    encoded, decoded = share if leg.kind != "fan" else scale, share if leg.kind == "chain" else scale
    latency = leg.latency * (1 if leg.kind == "fan" else leg.messages / count)
    before = after
    for index in range(count):
        earlier = (index + 1) * share if leg.kind == "fan" else share  # messages one after another on an owner's link
        encode = _Task(CODEC, load * leg.encode * share, before, idle * leg.encode * encoded)
        send = _Task(LINK, load * leg.wire * share, [encode], latency + idle * leg.wire * earlier)
        decode = _Task(CODEC, load * leg.decode * share, [send], idle * leg.decode * decoded)
        found += [encode, send, decode]
        if leg.kind == "relay":
            before = [send]
            ends.append(decode)
        elif leg.kind == "chain":
            before = ends = [decode]
        else:
            ends.append(decode)
        if index == 0 and leg.aside:  # not before the first message is on its way
            found.append(_Task(CODEC, load * leg.aside * scale, after, idle * leg.aside * scale))
            ends = [*ends, found[-1]]
    return found, ends


class _Loop:
    """Events in time, and a queue of ready tasks per resource."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, bool, _Task]] = []  # time, number, whether the task ends, task
        self._queues: tuple[list[tuple[int, int, _Task]], ...] = ([], [])
        self._idle = [True, True]
        self._busy = [0.0, 0.0]
        self._number = 0
        self._num_submitted = 0

    def submit(self, ready: float, tasks: list[_Task]) -> None:
        """Add the tasks of one partition."""
        self._num_submitted += 1
        for task in tasks:
            task.priority = self._num_submitted
            if task.pending == 0:
                self._at(ready, False, task)

    def run(self) -> Schedule:
        now = finish = 0.0
        while self._events:
            now, _, ends, task = heapq.heappop(self._events)
            if ends:
                self._end(now, task)
                finish = max(finish, now + task.lag)
            else:
                # The link goes by when a message is ready, the codec by when a tensor was submitted.
                rank = task.priority if task.resource == CODEC else 0
                self._number += 1
                heapq.heappush(self._queues[task.resource], (rank, self._number, task))
            if not self._events or self._events[0][0] > now:
                self._start(now)
        return Schedule(finish, self._busy[CODEC], self._busy[LINK])

    def _start(self, now: float) -> None:
        """Give each idle resource the first task of its queue."""
        for resource, queue in enumerate(self._queues):
            if queue and self._idle[resource]:
                task = heapq.heappop(queue)[2]
                self._idle[resource] = False
                self._busy[resource] += task.seconds
                self._at(now + task.seconds, True, task)

    def _end(self, now: float, task: _Task) -> None:
        self._idle[task.resource] = True
        for following in task.dependents:
            following.pending -= 1
            if following.pending == 0:
                self._at(now + task.lag, False, following)

    def _at(self, time: float, ends: bool, task: _Task) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, ends, task))
