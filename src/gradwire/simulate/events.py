"""The discrete-event engine: task graphs of many ranks in virtual time.

A rank has one processor queue, as `gradwire.sync.engine` has: sends first, then the lower priority number, then the
order in which tasks became ready; a task that runs is not interrupted. A message takes its turn at the sender's
channel, travels for the latency, and takes its turn at the receiver's. Channels are first come, first served at their
full rate, and both ends work at once: a message that finds both free takes its size over the slower rate, once.

What TCP does otherwise: connections that share a link are served side by side. That changes which of several messages
comes first, and not when the last one comes; a step waits for the last. Switches are taken to hold what a receiver
cannot take yet, which is what TCP's back pressure comes to where the sender has other messages to go on with.

Every task has a duration and an occupancy, and so has every message. They differ only where one simulated rank stands
for many that do not all have the task (`gradwire.simulate.fold`): then the task takes its whole duration, and keeps
the resource from others for the mean over those ranks. Messages of one group follow one another in full.

Guarantees: the same input gives the same output, to the bit; ties go in the order in which things became known.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from gradwire.kernels.cpu.compile import kernel

COMPUTE, SEND, RECV = 0, 1, 2
_START, _FREE, _DONE, _DONE_AND_FREE, _FIRST_BYTE, _ARRIVED = range(6)
_NUM_CODES = 8
_ORDER_BITS = 40


class Tasks(NamedTuple):
    """All tasks of all ranks. N tasks, G graphs, S successors, D deliveries.

    Attributes:
        kind: COMPUTE, SEND or RECV (N).
        rank: whose processor runs it (N).
        priority: of its graph; lower goes first (N).
        pending: tasks of its graph that it comes after (N).
        seconds: on the processor (N).
        occupancy: for how long it keeps the processor from others (N).
        successors_at, successors: what comes after each task (N + 1, S).
        graph_at: first task of each graph (G + 1).
        graph_ready: when each graph may begin (G).
        channel: of a send or a recv: which channel its message takes (N).
        wire_seconds: on that channel (N).
        wire_occupancy: for how long it keeps the channel from others (N).
        group: messages that follow one another in full on that channel (N).
        latency: of a send: seconds from its channel to the receiver's (N).
        deliveries_at, deliveries: the recvs that a send ends (N + 1, D).
    """

    kind: np.ndarray
    rank: np.ndarray
    priority: np.ndarray
    pending: np.ndarray
    seconds: np.ndarray
    occupancy: np.ndarray
    successors_at: np.ndarray
    successors: np.ndarray
    graph_at: np.ndarray
    graph_ready: np.ndarray
    channel: np.ndarray
    wire_seconds: np.ndarray
    wire_occupancy: np.ndarray
    group: np.ndarray
    latency: np.ndarray
    deliveries_at: np.ndarray
    deliveries: np.ndarray


class Trail(NamedTuple):
    """When everything happened. All in seconds from the beginning.

    Attributes:
        started: when the processor began; of a recv without work there, when it was complete (N).
        ended: when the task was over (N).
        wire_started: when the message began on its channel (N).
        wire_ended: when the message had left its channel (N).
        cause: the task that was the last to be waited for, or -1 for the beginning of the graph (N).
        processor_busy: seconds of each rank.
        channel_busy: seconds of each channel.
    """

    started: np.ndarray
    ended: np.ndarray
    wire_started: np.ndarray
    wire_ended: np.ndarray
    cause: np.ndarray
    processor_busy: np.ndarray
    channel_busy: np.ndarray


class _State(NamedTuple):
    """What changes while the events go by."""

    pending: np.ndarray
    heap_keys: np.ndarray  # the ready tasks of each rank: a heap each, beside one another
    heap_tasks: np.ndarray
    heap_at: np.ndarray
    heap_size: np.ndarray
    idle: np.ndarray  # by rank
    cores: np.ndarray  # free ones, of all ranks together
    waiting: np.ndarray  # ranks that wait for a core: a ring, with its two ends and a flag a rank
    waiting_ends: np.ndarray
    is_waiting: np.ndarray
    channel_free: np.ndarray
    group_free: np.ndarray
    last_byte: np.ndarray  # of the message of a recv: when it reaches the receiver's channel
    sender: np.ndarray  # of the message of a recv
    order: np.ndarray


def simulate(tasks: Tasks, num_ranks: int, num_channels: int, num_groups: int, cores: int | None = None) -> Trail:
    """Run all graphs to their end.

    Args:
        tasks: what to run.
        num_ranks: processors, one worker each.
        num_channels: channels of the network, each direction of each link counting for itself.
        num_groups: groups of messages.
        cores: how many tasks of all ranks together may run at once; None for as many as there are ranks.
    """
    n = tasks.kind.size
    in_heap = np.bincount(tasks.rank, minlength=num_ranks)
    state = _State(
        # Beside its predecessors, the first tasks wait for the graph to begin, and a recv for its message too.
        pending=np.where(tasks.kind == RECV, 2, np.maximum(tasks.pending, 1)),
        heap_keys=np.empty(n, np.int64),
        heap_tasks=np.empty(n, np.int64),
        heap_at=np.concatenate([[0], np.cumsum(in_heap)]).astype(np.int64),
        heap_size=np.zeros(num_ranks, np.int64),
        idle=np.ones(num_ranks, np.int64),
        cores=np.array([num_ranks if cores is None else cores], np.int64),
        waiting=np.empty(num_ranks + 1, np.int64),
        waiting_ends=np.zeros(2, np.int64),
        is_waiting=np.zeros(num_ranks, np.bool_),
        channel_free=np.zeros(num_channels),
        group_free=np.zeros(num_groups),
        last_byte=np.zeros(n),
        sender=np.full(n, -1, np.int64),
        order=np.zeros(1, np.int64),
    )
    trail = Trail(
        started=np.full(n, -1.0),
        ended=np.full(n, -1.0),
        wire_started=np.full(n, -1.0),
        wire_ended=np.full(n, -1.0),
        cause=np.full(n, -1, np.int64),
        processor_busy=np.zeros(num_ranks),
        channel_busy=np.zeros(num_channels),
    )
    _run(tasks, state, trail)
    assert trail.ended.min(initial=0.0) >= 0, f"{int((trail.ended < 0).sum())} of {n} tasks never ended"
    return trail


@kernel
def _run(tasks: Any, state: Any, trail: Any) -> None:
    events = [(0.0, 0, 0)]  # time, order, what
    heappop(events)
    for graph in range(tasks.graph_ready.size):
        _schedule(events, state, tasks.graph_ready[graph], _START, graph)
    while len(events) > 0:
        now, _, what = heappop(events)
        index, code = what // _NUM_CODES, what % _NUM_CODES
        if code == _START:
            _begin(tasks, state, trail, events, now, index)
        elif code == _FIRST_BYTE:
            _enter(tasks, state, trail, events, now, index)
        elif code == _ARRIVED:
            trail.wire_ended[index] = now
            _release(tasks, state, trail, now, index, state.sender[index])
            _dispatch(tasks, state, trail, events, now, tasks.rank[index])
        else:
            if code != _FREE:
                if tasks.kind[index] == SEND:
                    _transmit(tasks, state, trail, events, now, index)
                _end(tasks, state, trail, now, index)
            rank = tasks.rank[index]
            if code != _DONE:
                state.idle[rank] += 1
                state.cores[0] += 1
            _hand_out_cores(tasks, state, trail, events, now)  # who waits for a core comes before who had it
            _dispatch(tasks, state, trail, events, now, rank)


@kernel
def _schedule(events: Any, state: Any, time: float, code: int, index: int) -> None:
    state.order[0] += 1
    heappush(events, (time, state.order[0], index * _NUM_CODES + code))


@kernel
def _begin(tasks: Any, state: Any, trail: Any, events: Any, now: float, graph: int) -> None:
    """Start a graph. A recv waits for this and for its message."""
    first, last = tasks.graph_at[graph], tasks.graph_at[graph + 1]
    for task in range(first, last):
        if tasks.kind[task] == RECV or tasks.pending[task] == 0:
            _release(tasks, state, trail, now, task, -1)
    if last > first:
        _dispatch(tasks, state, trail, events, now, tasks.rank[first])


@kernel
def _release(tasks: Any, state: Any, trail: Any, now: float, task: int, cause: int) -> None:
    """One thing less to wait for; after the last, the task is ready."""
    state.pending[task] -= 1
    if state.pending[task] > 0:
        return
    trail.cause[task] = cause
    if tasks.kind[task] == RECV and tasks.seconds[task] == 0.0:
        trail.started[task] = now
        _end_recv(tasks, state, trail, now, task)
    else:
        _push(tasks, state, task)


@kernel
def _end(tasks: Any, state: Any, trail: Any, now: float, task: int) -> None:
    trail.ended[task] = now
    for at in range(tasks.successors_at[task], tasks.successors_at[task + 1]):
        _release(tasks, state, trail, now, tasks.successors[at], task)


@kernel
def _end_recv(tasks: Any, state: Any, trail: Any, now: float, task: int) -> None:
    """As `_end`. A recv comes after no other task, so its successors have work for the processor: no recursion."""
    trail.ended[task] = now
    for at in range(tasks.successors_at[task], tasks.successors_at[task + 1]):
        successor = tasks.successors[at]
        state.pending[successor] -= 1
        if state.pending[successor] == 0:
            trail.cause[successor] = task
            _push(tasks, state, successor)


# -- the processors ----------------------------------------------------------------------------------------------


@kernel
def _dispatch(tasks: Any, state: Any, trail: Any, events: Any, now: float, rank: int) -> None:
    """Give an idle processor its next task, if there is a core for it."""
    if state.idle[rank] == 0 or state.heap_size[rank] == 0:
        return
    if state.cores[0] == 0:
        if not state.is_waiting[rank]:
            state.is_waiting[rank] = True
            state.waiting[state.waiting_ends[1]] = rank
            state.waiting_ends[1] = (state.waiting_ends[1] + 1) % state.waiting.size
        return
    task = _pop(state, rank)
    state.idle[rank] -= 1
    state.cores[0] -= 1
    seconds, occupancy = tasks.seconds[task], tasks.occupancy[task]
    trail.started[task] = now
    trail.processor_busy[rank] += occupancy
    if seconds == occupancy:
        _schedule(events, state, now + seconds, _DONE_AND_FREE, task)
    else:
        _schedule(events, state, now + occupancy, _FREE, task)
        _schedule(events, state, now + seconds, _DONE, task)


@kernel
def _hand_out_cores(tasks: Any, state: Any, trail: Any, events: Any, now: float) -> None:
    while state.cores[0] > 0 and state.waiting_ends[0] != state.waiting_ends[1]:
        rank = state.waiting[state.waiting_ends[0]]
        state.waiting_ends[0] = (state.waiting_ends[0] + 1) % state.waiting.size
        state.is_waiting[rank] = False
        _dispatch(tasks, state, trail, events, now, rank)


@kernel
def _push(tasks: Any, state: Any, task: int) -> None:
    rank = tasks.rank[task]
    urgent = tasks.kind[task] != COMPUTE  # as the real engine: the link should never wait for the processor
    state.order[0] += 1
    key = ((0 if urgent else 1 << 20) + tasks.priority[task]) * (1 << _ORDER_BITS) + state.order[0]
    base, at = state.heap_at[rank], state.heap_size[rank]
    state.heap_size[rank] += 1
    while at > 0:
        parent = (at - 1) // 2
        if state.heap_keys[base + parent] < key:
            break
        state.heap_keys[base + at] = state.heap_keys[base + parent]
        state.heap_tasks[base + at] = state.heap_tasks[base + parent]
        at = parent
    state.heap_keys[base + at] = key
    state.heap_tasks[base + at] = task


@kernel
def _pop(state: Any, rank: int) -> Any:
    base, size = state.heap_at[rank], state.heap_size[rank] - 1
    state.heap_size[rank] = size
    found = state.heap_tasks[base]
    key, task = state.heap_keys[base + size], state.heap_tasks[base + size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and state.heap_keys[base + child + 1] < state.heap_keys[base + child]:
            child += 1
        if key < state.heap_keys[base + child]:
            break
        state.heap_keys[base + at] = state.heap_keys[base + child]
        state.heap_tasks[base + at] = state.heap_tasks[base + child]
        at = child
    state.heap_keys[base + at] = key
    state.heap_tasks[base + at] = task
    return found


# -- the network -------------------------------------------------------------------------------------------------


@kernel
def _occupy(tasks: Any, state: Any, trail: Any, now: float, task: int) -> Any:
    """The next turn of a message at its channel."""
    channel, group = tasks.channel[task], tasks.group[task]
    begin = max(now, state.channel_free[channel])
    state.channel_free[channel] = begin + tasks.wire_occupancy[task]
    trail.channel_busy[channel] += tasks.wire_occupancy[task]
    begin = max(begin, state.group_free[group])
    state.group_free[group] = begin + tasks.wire_seconds[task]
    trail.wire_started[task] = begin
    return begin


@kernel
def _transmit(tasks: Any, state: Any, trail: Any, events: Any, now: float, task: int) -> None:
    begin = _occupy(tasks, state, trail, now, task)
    trail.wire_ended[task] = begin + tasks.wire_seconds[task]
    for at in range(tasks.deliveries_at[task], tasks.deliveries_at[task + 1]):
        recv = tasks.deliveries[at]
        state.sender[recv] = task
        state.last_byte[recv] = trail.wire_ended[task] + tasks.latency[task]
        _schedule(events, state, begin + tasks.latency[task], _FIRST_BYTE, recv)


@kernel
def _enter(tasks: Any, state: Any, trail: Any, events: Any, now: float, task: int) -> None:
    begin = _occupy(tasks, state, trail, now, task)
    _schedule(events, state, max(begin + tasks.wire_seconds[task], state.last_byte[task]), _ARRIVED, task)
