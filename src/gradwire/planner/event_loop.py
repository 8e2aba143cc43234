"""The event loop of a schedule: tasks on one codec and one link, in time. Compiled, because a plan runs it many times.

A task is queued when all tasks that it waits for have ended, each followed by its lag. An idle codec takes the queued
task whose batch was submitted first, an idle link the one that was queued first. Events of the same time are handled in
the order in which they were found, before codec and link take new tasks.
"""
# Shapes: T = tasks, D = pairs of a task and one that waits for it, B = batches

from __future__ import annotations

import heapq

import numpy as np

from gradwire.kernels.cpu.compile import kernel

CODEC, LINK = 0, 1
TASK = np.dtype(
    [
        ("resource", np.int64),  # CODEC or LINK
        ("seconds", np.float64),  # for which the resource is busy
        ("lag", np.float64),  # from when it is free again to the tasks that wait for this one
        ("num_before", np.int64),  # tasks that this one waits for
        ("num_dependents", np.int64),  # tasks that wait for this one
    ]
)


@kernel
def run_tasks(tasks, dependents, sizes, ready):
    """Schedule the tasks of batches.

    Args:
        tasks: Tasks of all batches, batch by batch, `TASK`[T].
        dependents: For each task in turn, distances in `tasks` to those that wait for it, int64[D].
        sizes: Number of tasks of each batch, int64[B].
        ready: When tasks of each batch that wait for nothing are queued, in seconds, float64[B].

    Returns:
        When the last task has ended, its lag included, and the seconds for which codec and link were busy.
    """
    resource, seconds, lag, pending = tasks["resource"], tasks["seconds"], tasks["lag"], tasks["num_before"].copy()
    end_of_dependents = np.cumsum(tasks["num_dependents"])
    batch = np.repeat(np.arange(sizes.size), sizes)
    events = [(0.0, 0, False, 0) for _ in range(0)]  # time, number, whether the task ends, task
    queues = [(0, 0, 0) for _ in range(0)], [(0, 0, 0) for _ in range(0)]  # rank in the queue, number, task
    is_idle, busy, number, finish = [True, True], [0.0, 0.0], 0, 0.0
    for task in range(tasks.size):
        if pending[task] == 0:
            number += 1
            heapq.heappush(events, (ready[batch[task]], number, False, task))
    while events:
        now, _, ends, task = heapq.heappop(events)
        number += 1
        if not ends:
            rank = batch[task] if resource[task] == CODEC else 0
            heapq.heappush(queues[resource[task]], (rank, number, task))
        else:
            is_idle[resource[task]] = True
            done = now + lag[task]
            finish = max(finish, done)
            end = end_of_dependents[task]
            for place in range(end - tasks["num_dependents"][task], end):
                following = task + dependents[place]
                pending[following] -= 1
                if pending[following] == 0:
                    number += 1
                    heapq.heappush(events, (done, number, False, following))
        if events and events[0][0] == now:
            continue
        for each in (CODEC, LINK):
            if is_idle[each] and queues[each]:
                task = heapq.heappop(queues[each])[2]
                is_idle[each] = False
                busy[each] += seconds[task]
                number += 1
                heapq.heappush(events, (now + seconds[task], number, True, task))
    return finish, busy[CODEC], busy[LINK]
