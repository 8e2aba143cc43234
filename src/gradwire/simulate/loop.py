"""The event loop, compiled. All of it stands in one module, so that one cache entry holds it.

`gradwire.simulate.events` describes the model.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

from gradwire.kernels.cpu.compile import kernel

COMPUTE, SEND, RECV, HAND = range(4)
UNBATCHED, ALONE, SLOTS, COORDINATED = range(4)
_START, _FREE, _DONE, _DONE_AND_FREE, _FIRST_BYTE, _ARRIVED, _REPORT, _KNOWN, _DECIDE, _GRANT, _AGAIN = range(11)
_NUM_CODES = 16
_ORDER_BITS = 40
_EPSILON = 1e-12  # seconds that count as no time


@kernel
def run(tasks: Any, state: Any, trail: Any, bulk: Any) -> None:
    events = [(0.0, 0, 0)]  # time, order, index and code
    heappop(events)
    for graph in range(tasks.graph_ready.size):
        _schedule(events, state, tasks.graph_ready[graph], _START, graph)
    while len(events) > 0:
        now, _, event = heappop(events)
        index, code = event // _NUM_CODES, event % _NUM_CODES
        if code == _START:
            _begin(tasks, state, trail, now, index)
        elif code == _FIRST_BYTE:
            _enter(tasks, state, trail, events, now, index)
        elif code == _ARRIVED:
            trail.wire_ended[index] = now
            _leave_port(state, bulk, index)
            _release(tasks, state, trail, now, index, state.sender[index])
        elif code == _REPORT:
            _report(tasks, state, trail, bulk, events, now, index)
        elif code == _KNOWN:
            _learn(state, bulk, events, now, index)
        elif code == _DECIDE:
            _decide(tasks, state, trail, bulk, events, now, index)
        elif code == _GRANT:
            _send_batch(tasks, state, trail, bulk, events, now, index)
        elif code == _AGAIN:
            _launch(tasks, state, trail, bulk, events, now, index)
        else:
            if code != _FREE:
                if tasks.kind[index] == SEND:
                    _offer(tasks, state, trail, bulk, events, now, index)
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
    """Start a graph. A recv waits for the start and for its message."""
    for task in range(tasks.graph_at[graph], tasks.graph_at[graph + 1]):
        if tasks.kind[task] == RECV or tasks.pending[task] == 0:
            _release(tasks, state, trail, now, task, -1)


@kernel
def _release(tasks: Any, state: Any, trail: Any, now: float, task: int, cause: int) -> None:
    """Count one dependency as done. After the last, the task is ready."""
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
    """Like `_end`, without recursion: a recv has no predecessors, so its successors are never recvs."""
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
    """Append a processor to the queue for cores, unless it waits already."""
    if not state.is_waiting[processor] and state.idle[processor] > 0 and state.heap_size[processor] > 0:
        state.is_waiting[processor] = True
        state.waiting[state.waiting_ends[1]] = processor
        state.waiting_ends[1] = (state.waiting_ends[1] + 1) % state.waiting.size


@kernel
def _free(state: Any, processor: int) -> None:
    """Free a processor. A thread with more to do keeps its core, as an operating system would let it for a while."""
    state.idle[processor] += 1
    state.cores[0] += 1
    if not state.is_waiting[processor] and state.heap_size[processor] > 0:
        state.is_waiting[processor] = True
        state.waiting_ends[0] = (state.waiting_ends[0] - 1) % state.waiting.size
        state.waiting[state.waiting_ends[0]] = processor


@kernel
def _dispatch(tasks: Any, state: Any, trail: Any, events: Any, now: float) -> None:
    """Start the next tasks of idle processors while there are cores, in the order in which processors woke up."""
    while state.cores[0] > 0 and state.waiting_ends[0] != state.waiting_ends[1]:
        processor = state.waiting[state.waiting_ends[0]]
        state.waiting_ends[0] = (state.waiting_ends[0] + 1) % state.waiting.size
        state.is_waiting[processor] = False
        task = _pop(state, processor)
        state.idle[processor] -= 1
        state.cores[0] -= 1
        waking = state.wake[0] if now > state.worked_until[processor] else 0.0
        seconds, occupancy = tasks.seconds[task] + waking, tasks.occupancy[task] + waking
        trail.started[task] = now
        trail.processor_busy[processor] += occupancy
        state.worked_until[processor] = now + occupancy
        if seconds == occupancy:
            _schedule(events, state, now + seconds, _DONE_AND_FREE, task)
        else:
            _schedule(events, state, now + occupancy, _FREE, task)
            _schedule(events, state, now + seconds, _DONE, task)


@kernel
def _push(tasks: Any, state: Any, task: int) -> None:
    processor = tasks.processor[task]
    urgent = tasks.kind[task] != COMPUTE  # as in the real engine: the link should never wait for the processor
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
    """Queue a message at its channel, and its acknowledgements at the opposite one. Returns when the message begins."""
    channel, group = tasks.channel[task], tasks.group[task]
    other = channel ^ 1
    state.channel_free[other] = max(now, state.channel_free[other]) + tasks.ack_seconds[task]
    trail.channel_busy[other] += tasks.ack_seconds[task]
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


# -- full queues, see `gradwire.simulate.cluster` ----------------------------------------------------------------


@kernel
def _launch(tasks: Any, state: Any, trail: Any, bulk: Any, events: Any, now: float, task: int) -> None:
    """Send a message, unless the receiver's port has no room for its connection."""
    rules, ports = bulk.rules, bulk.ports
    if rules.queue > 0.0:
        destination, nbytes = bulk.messages.destination[task], bulk.messages.nbytes[task]
        link = bulk.messages.source[task] * rules.num_ranks + destination
        if ports.stalled_until[link] > now:
            _schedule(events, state, ports.stalled_until[link], _AGAIN, task)
            return
        burst = min(nbytes, rules.window)
        more = burst - ports.window[link]
        if more > 0.0:
            # Less than a byte is what rounding leaves of an empty queue.
            others = ports.filled[destination] - ports.window[link]
            if others >= 1.0 and others + burst > rules.queue:
                channel, seconds = tasks.channel[task], tasks.wire_occupancy[task] * burst / nbytes
                state.channel_free[channel] = max(now, state.channel_free[channel]) + seconds
                trail.channel_busy[channel] += seconds
                trail.lost[0] += 1
                ports.stalled_until[link] = now + rules.resend_after
                _schedule(events, state, ports.stalled_until[link], _AGAIN, task)
                return
            ports.window[link] = burst
            ports.filled[destination] += more
        ports.under_way[link] += 1
    _transmit(tasks, state, trail, events, now, task)


@kernel
def _leave_port(state: Any, bulk: Any, recv: int) -> None:
    rules, ports = bulk.rules, bulk.ports
    if rules.queue > 0.0:
        send = state.sender[recv]
        destination = bulk.messages.destination[send]
        link = bulk.messages.source[send] * rules.num_ranks + destination
        ports.under_way[link] -= 1
        if ports.under_way[link] == 0:
            ports.filled[destination] -= ports.window[link]
            ports.window[link] = 0.0


# -- batches of messages, see `gradwire.simulate.bulk` ----------------------------------------------------------


@kernel
def _offer(tasks: Any, state: Any, trail: Any, bulk: Any, events: Any, now: float, task: int) -> None:
    """Send a ready message, or let it wait for its batch."""
    rules, queues = bulk.rules, bulk.queues
    source = bulk.messages.source[task] if rules.mode != UNBATCHED else 0
    if rules.mode == UNBATCHED:
        _launch(tasks, state, trail, bulk, events, now, task)
    elif rules.mode != COORDINATED:
        _learn(state, bulk, events, now, task)
        _schedule(events, state, now, _DECIDE, source * rules.num_ranks + source)
    else:
        if queues.report_size[source] == 0:
            queues.report_first[source] = task
            _schedule(events, state, now + rules.report_after, _REPORT, source)
        else:
            bulk.messages.next_of[queues.report_last[source]] = task
        queues.report_last[source] = task
        queues.report_size[source] += 1


@kernel
def _report(tasks: Any, state: Any, trail: Any, bulk: Any, events: Any, now: float, rank: int) -> None:
    """A rank reports its ready messages to the coordinator."""
    queues, rules = bulk.queues, bulk.rules
    arrived = _control(state, trail, bulk, now, rank, 0, queues.report_size[rank])
    known = max(arrived, queues.free_at[0]) + rules.deciding
    queues.free_at[0] = known
    task = queues.report_first[rank]
    queues.report_size[rank] = 0
    while task >= 0:
        following = bulk.messages.next_of[task]
        bulk.messages.next_of[task] = -1
        _schedule(events, state, known, _KNOWN, task)
        task = following
    _schedule(events, state, known, _DECIDE, rank * rules.num_ranks + rank)


@kernel
def _control(state: Any, trail: Any, bulk: Any, now: float, sender: int, receiver: int, entries: int) -> Any:
    """Send a control message past the queues of other connections. Returns when it arrives."""
    if sender == receiver:
        return now
    queues, longest = bulk.queues, 0.0
    for rank, channel in ((sender, 2 * sender), (receiver, 2 * receiver + 1)):
        seconds = queues.control_seconds[rank] + entries * queues.entry_seconds[rank]
        state.channel_free[channel] = max(state.channel_free[channel], now) + seconds
        trail.channel_busy[channel] += seconds
        longest = max(longest, seconds)
    return now + longest + bulk.rules.latency


@kernel
def _learn(state: Any, bulk: Any, events: Any, now: float, task: int) -> None:
    """Add a message to the queue of its link."""
    messages, queues, rules = bulk.messages, bulk.queues, bulk.rules
    source = messages.source[task]
    link = source * rules.num_ranks + messages.destination[task]
    state.order[0] += 1
    messages.known_at[task], messages.turn[task] = now, state.order[0]
    if queues.first[link] < 0:
        queues.first[link] = task
    else:
        messages.next_of[queues.last[link]] = task
    queues.last[link] = task
    queues.queued[link] += messages.nbytes[task]
    if rules.timeout > 0.0:
        _schedule(events, state, now + rules.timeout, _DECIDE, link)


@kernel
def _is_due(bulk: Any, now: float, link: int) -> Any:
    """Whether a link has a batch to send and both its ends are about to be idle."""
    rules, queues, soon = bulk.rules, bulk.queues, now + bulk.rules.lead + _EPSILON
    if queues.first[link] < 0 or queues.egress_until[link // rules.num_ranks] > soon:
        return False
    if rules.mode == COORDINATED and queues.ingress_until[link % rules.num_ranks] > soon:
        return False
    waited = now - bulk.messages.known_at[queues.first[link]]
    return queues.queued[link] >= rules.threshold or waited + _EPSILON >= rules.timeout


@kernel
def _decide(tasks: Any, state: Any, trail: Any, bulk: Any, events: Any, now: float, link: int) -> None:
    """Grant the sender and the receiver of a link their next batch: of the due links, the one that waited longest."""
    ranks = bulk.rules.num_ranks
    source, destination = link // ranks, link % ranks
    if bulk.rules.mode == SLOTS:
        _next_slot(tasks, state, trail, bulk, events, now, source)
        return
    for row in range(1 if source == destination else 2):
        best = -1
        for step in range(1, ranks):
            at = (
                source * ranks + (source + step) % ranks
                if row == 0
                else (destination + step) % ranks * ranks + destination
            )
            if _is_due(bulk, now, at) and (best < 0 or _turn(bulk, at) < _turn(bulk, best)):
                best = at
        if best >= 0:
            _grant(tasks, state, trail, bulk, events, now, best)


@kernel
def _next_slot(tasks: Any, state: Any, trail: Any, bulk: Any, events: Any, now: float, source: int) -> None:
    """Begin the next slot of an idle sender in which there is something to send; if there is none, start over."""
    ranks, queues = bulk.rules.num_ranks, bulk.queues
    if queues.egress_until[source] > now + _EPSILON:
        return
    for step in range(ranks - 1):
        slot = (queues.slot[source] + step) % (ranks - 1) + 1
        at = source * ranks + (source + slot) % ranks
        if queues.first[at] >= 0:
            queues.slot[source] = slot
            _grant(tasks, state, trail, bulk, events, now, at)
            return
    queues.slot[source] = 0


@kernel
def _turn(bulk: Any, link: int) -> Any:
    return bulk.messages.turn[bulk.queues.first[link]]


@kernel
def _grant(tasks: Any, state: Any, trail: Any, bulk: Any, events: Any, now: float, link: int) -> None:
    """Take a batch from a queue and notify its sender."""
    messages, queues, rules = bulk.messages, bulk.queues, bulk.rules
    source, destination = link // rules.num_ranks, link % rules.num_ranks
    first = task = queues.first[link]
    nbytes, seconds, size = 0.0, 0.0, 0
    while task >= 0 and (size == 0 or nbytes + messages.nbytes[task] <= rules.threshold):
        recv = tasks.deliveries[tasks.deliveries_at[task]]
        if size > 0:
            _join(tasks, bulk, task, recv)
        nbytes += messages.nbytes[task]
        seconds += max(tasks.wire_seconds[task], tasks.wire_seconds[recv])
        last, task, size = task, messages.next_of[task], size + 1
    messages.next_of[last] = -1
    queues.first[link] = task
    queues.queued[link] -= nbytes
    at = now
    if rules.mode == COORDINATED:
        decided = max(now, queues.free_at[0]) + 2 * rules.deciding
        queues.free_at[0] = decided
        at = _control(state, trail, bulk, decided, 0, source, size)
        _control(state, trail, bulk, decided, 0, destination, size)
    until = max(at, queues.egress_until[source], queues.ingress_until[destination]) + seconds
    queues.egress_until[source] = until
    if rules.mode == COORDINATED:
        queues.ingress_until[destination] = until
    _schedule(events, state, at, _GRANT, first)
    _schedule(events, state, max(now, until - rules.lead), _DECIDE, link)


@kernel
def _join(tasks: Any, bulk: Any, send: int, recv: int) -> None:
    """Let a message that follows another in its batch take no time of a frame."""
    for task in (send, recv):
        tasks.wire_seconds[task] -= bulk.messages.saved_wire[task]
        tasks.wire_occupancy[task] -= bulk.messages.saved_wire[task]
    tasks.seconds[recv] -= bulk.rules.saved_seconds
    tasks.occupancy[recv] -= bulk.rules.saved_seconds


@kernel
def _send_batch(tasks: Any, state: Any, trail: Any, bulk: Any, events: Any, now: float, task: int) -> None:
    while task >= 0:
        following = bulk.messages.next_of[task]
        bulk.messages.next_of[task] = -1
        _launch(tasks, state, trail, bulk, events, now, task)
        task = following
