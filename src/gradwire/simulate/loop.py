"""The loop of the discrete-event engine, and what events do: compiled, all in one module, so that one cache holds it.

`gradwire.simulate.events` says what is simulated and how.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

from gradwire.kernels.cpu.compile import kernel

COMPUTE, SEND, RECV, HAND = range(4)
_START, _FREE, _DONE, _DONE_AND_FREE, _FIRST_BYTE, _ARRIVED, _REPORT, _KNOWN, _DECIDE, _GRANT = range(10)
_NUM_CODES = 16
_ORDER_BITS = 40


@kernel
def run(tasks: Any, state: Any, trail: Any) -> None:
    events = [(0.0, 0, 0)]  # time, order, what
    heappop(events)
    for graph in range(tasks.graph_ready.size):
        _schedule(events, state, tasks.graph_ready[graph], _START, graph)
    while len(events) > 0:
        now, _, what = heappop(events)
        index, code = what // _NUM_CODES, what % _NUM_CODES
        if code == _START:
            _begin(tasks, state, trail, now, index)
        elif code == _FIRST_BYTE:
            _enter(tasks, state, trail, events, now, index)
        elif code == _ARRIVED:
            trail.wire_ended[index] = now
            _release(tasks, state, trail, now, index, state.sender[index])
        else:
            if code != _FREE:
                if tasks.kind[index] == SEND:
                    _transmit(tasks, state, trail, events, now, index)
                _end(tasks, state, trail, now, index)
            if code != _DONE:
                _free(state, tasks.processor[index])
        _dispatch(tasks, state, trail, events, now)


@kernel
def _schedule(events: Any, state: Any, time: float, code: int, index: int) -> None:
    state.order[0] += 1
    heappush(events, (time, state.order[0], index * _NUM_CODES + code))


@kernel
def _begin(tasks: Any, state: Any, trail: Any, now: float, graph: int) -> None:
    """Start a graph. A recv waits for this and for its message."""
    for task in range(tasks.graph_at[graph], tasks.graph_at[graph + 1]):
        if tasks.kind[task] == RECV or tasks.pending[task] == 0:
            _release(tasks, state, trail, now, task, -1)


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
def _queue(state: Any, processor: int) -> None:
    """Let a processor wait for a core: at the end of the queue, once."""
    if not state.is_waiting[processor] and state.idle[processor] > 0 and state.heap_size[processor] > 0:
        state.is_waiting[processor] = True
        state.waiting[state.waiting_ends[1]] = processor
        state.waiting_ends[1] = (state.waiting_ends[1] + 1) % state.waiting.size


@kernel
def _free(state: Any, processor: int) -> None:
    state.idle[processor] += 1
    state.cores[0] += 1
    _queue(state, processor)


@kernel
def _dispatch(tasks: Any, state: Any, trail: Any, events: Any, now: float) -> None:
    """Give idle processors their next tasks, as far as there are cores, in the order in which they began to wait."""
    while state.cores[0] > 0 and state.waiting_ends[0] != state.waiting_ends[1]:
        processor = state.waiting[state.waiting_ends[0]]
        state.waiting_ends[0] = (state.waiting_ends[0] + 1) % state.waiting.size
        state.is_waiting[processor] = False
        task = _pop(state, processor)
        state.idle[processor] -= 1
        state.cores[0] -= 1
        seconds, occupancy = tasks.seconds[task], tasks.occupancy[task]
        trail.started[task] = now
        trail.processor_busy[processor] += occupancy
        if seconds == occupancy:
            _schedule(events, state, now + seconds, _DONE_AND_FREE, task)
        else:
            _schedule(events, state, now + occupancy, _FREE, task)
            _schedule(events, state, now + seconds, _DONE, task)


@kernel
def _push(tasks: Any, state: Any, task: int) -> None:
    processor = tasks.processor[task]
    urgent = tasks.kind[task] != COMPUTE  # as the real engine: the link should never wait for the processor
    state.order[0] += 1
    key = ((0 if urgent else 1 << 20) + tasks.priority[task]) * (1 << _ORDER_BITS) + state.order[0]
    base, at = state.heap_at[processor], state.heap_size[processor]
    state.heap_size[processor] += 1
    while at > 0:
        parent = (at - 1) // 2
        if state.heap_keys[base + parent] < key:
            break
        state.heap_keys[base + at] = state.heap_keys[base + parent]
        state.heap_tasks[base + at] = state.heap_tasks[base + parent]
        at = parent
    state.heap_keys[base + at] = key
    state.heap_tasks[base + at] = task
    _queue(state, processor)


@kernel
def _pop(state: Any, processor: int) -> Any:
    base, size = state.heap_at[processor], state.heap_size[processor] - 1
    state.heap_size[processor] = size
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
