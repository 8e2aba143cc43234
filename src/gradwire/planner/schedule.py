"""The step: many tensors' routes beside a backward, on one rank's two resources, link and codec.

A list schedule, as the engine works: tensors start when backward has made them, the codec takes the ready task of the
tensor that was submitted first, the link sends in the order in which messages are ready. All ranks are alike, so that
what a rank waits for arrives when it sends the same itself.

Messages of one leg are taken together in a few pieces, which keeps thousands of ranks as cheap as four; the simulator
runs the graphs themselves, message by message.

Source: HiPress (SOSP 2021), sections 3.1 and 3.3. Differences: the paper plans each tensor by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.planner.closed_forms import Leg, Route

CODEC, LINK = 0, 1
# Among many tensors half of these do, for there other tensors fill the gaps.
PIECES = 4  # of a leg
MAX_BATCHES = 8  # of one tensor; more are taken together
MANY = 32


class ScheduledTensor(NamedTuple):
    """One tensor (or batch of small ones): when its gradient is there, and its way."""

    ready: float
    route: Route


@dataclass(frozen=True)
class Schedule:
    """What a schedule gives. Seconds from the start of backward.

    Attributes:
        finish: when the last mean is there.
        codec: how long the codec works in all.
        link: how long the link is busy in all.
    """

    finish: float
    codec: float
    link: float


class _Task:
    __slots__ = ("behind", "lag", "pending", "priority", "resource", "seconds")

    def __init__(self, resource: int, seconds: float, after: Sequence[_Task], lag: float = 0.0) -> None:
        self.resource = resource
        self.seconds = seconds
        self.lag = lag  # from its end to what comes behind it
        self.behind: list[_Task] = []
        self.pending = len(after)
        self.priority = 0
        for task in after:
            task.behind.append(self)


def run(jobs: Iterable[ScheduledTensor]) -> Schedule:
    """Schedule jobs, which are given in the order of their submission."""
    jobs = list(jobs)
    few = len(jobs) <= MANY
    most, most_batches = (PIECES, MAX_BATCHES) if few else (PIECES // 2, MAX_BATCHES // 2)
    loop = _Loop()
    for job in jobs:
        route = job.route
        batches = min(route.batches, most_batches)
        for _ in range(batches):
            loop.submit(job.ready, _tasks(route.legs, route.batches / batches, most))
    return loop.run()


def _tasks(legs: Sequence[Leg], scale: float, most: int) -> list[_Task]:
    """One batch as tasks; each leg waits for the whole leg before it."""
    found: list[_Task] = []
    last: list[_Task] = []
    for leg in legs:
        made, last = _leg_tasks(leg, scale, most, last)
        found += made
    return found


def _leg_tasks(leg: Leg, scale: float, most: int, after: list[_Task]) -> tuple[list[_Task], list[_Task]]:
    """Tasks of a leg, and those of them that its end waits for."""
    if leg.kind == "work":
        work = _Task(CODEC, leg.coding * scale, after)
        return [work], [work]
    found: list[_Task] = []
    ends: list[_Task] = []
    pieces = min(leg.messages, most if leg.kind == "fan" else most // 2)
    share = scale * leg.messages / pieces
    lag = leg.latency * (1 if leg.kind == "fan" else leg.messages / pieces)
    before = after
    for piece in range(pieces):
        encode = _Task(CODEC, leg.encode * share, before)
        send = _Task(LINK, leg.wire * share, [encode], lag)
        decode = _Task(CODEC, leg.decode * share, [send])
        found += [encode, send, decode]
        if leg.kind == "relay":
            before = [send]
            ends.append(decode)
        elif leg.kind == "chain":
            before = ends = [decode]
        else:
            ends.append(decode)
        if piece == 0 and leg.aside:  # not before the first message is on its way
            found.append(_Task(CODEC, leg.aside * scale, after))
            ends = [*ends, found[-1]]
    return found, ends


class _Loop:
    """Events in time, and a queue of ready tasks a resource."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, bool, _Task]] = []  # time, number, whether it ends, task
        self._queues: tuple[list[tuple[int, int, _Task]], ...] = ([], [])
        self._idle = [True, True]
        self._busy = [0.0, 0.0]
        self._number = 0
        self._batches = 0

    def submit(self, ready: float, tasks: list[_Task]) -> None:
        """Add the tasks of one batch."""
        self._batches += 1
        for task in tasks:
            task.priority = self._batches
            if task.pending == 0:
                self._at(ready, False, task)

    def run(self) -> Schedule:
        now = 0.0
        while self._events:
            now, _, ends, task = heapq.heappop(self._events)
            if ends:
                self._end(now, task)
            else:
                # The link sends first what is ready first, the codec takes first what was submitted first.
                rank = task.priority if task.resource == CODEC else 0
                self._number += 1
                heapq.heappush(self._queues[task.resource], (rank, self._number, task))
            if not self._events or self._events[0][0] > now:
                self._start(now)
        return Schedule(now, self._busy[CODEC], self._busy[LINK])

    def _start(self, now: float) -> None:
        """Give each idle resource the first of its queue."""
        for resource, queue in enumerate(self._queues):
            if queue and self._idle[resource]:
                task = heapq.heappop(queue)[2]
                self._idle[resource] = False
                self._busy[resource] += task.seconds
                self._at(now + task.seconds, True, task)

    def _end(self, now: float, task: _Task) -> None:
        self._idle[task.resource] = True
        for following in task.behind:
            following.pending -= 1
            if following.pending == 0:
                self._at(now + task.lag, False, following)

    def _at(self, time: float, ends: bool, task: _Task) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, ends, task))
