"""The discrete-event engine: task graphs of many ranks in virtual time.

A processor has one queue, as `gradwire.sync.engine` has: sends first, then the lower priority number, then the
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

from typing import NamedTuple

import numpy as np

from gradwire.simulate.bulk import Coordination, unbatched
from gradwire.simulate.loop import RECV, run
from gradwire.simulate.tasks import Tasks


class Trail(NamedTuple):
    """When everything happened. All in seconds from the beginning.

    Attributes:
        started: when the processor began; of a recv without work there, when it was complete (N).
        ended: when the task was over (N).
        wire_started: when the message began on its channel (N).
        wire_ended: when the message had left its channel (N).
        cause: the task that was the last to be waited for, or -1 for the beginning of the graph (N).
        processor_busy: seconds of each processor.
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
    heap_keys: np.ndarray  # the ready tasks of each processor: a heap each, beside one another
    heap_tasks: np.ndarray
    heap_at: np.ndarray
    heap_size: np.ndarray
    idle: np.ndarray  # by processor
    cores: np.ndarray  # free ones
    waiting: np.ndarray  # processors that wait for a core: a ring, with its two ends and a flag each
    waiting_ends: np.ndarray
    is_waiting: np.ndarray
    worked_until: np.ndarray  # by processor: the end of its last task
    wake: np.ndarray  # seconds
    channel_free: np.ndarray
    group_free: np.ndarray
    last_byte: np.ndarray  # of the message of a recv: when it reaches the receiver's channel
    sender: np.ndarray  # of the message of a recv
    order: np.ndarray


def simulate(
    tasks: Tasks,
    num_processors: int,
    num_channels: int,
    num_groups: int,
    cores: int | None = None,
    wake_seconds: float = 0.0,
    coordination: Coordination | None = None,
) -> Trail:
    """Run all graphs to their end.

    Args:
        tasks: what to run.
        num_processors: each runs one task at a time.
        num_channels: channels of the network, each direction of each link counting for itself.
        num_groups: groups of messages.
        cores: how many tasks may run at once on all of them; None for one on each.
        wake_seconds: for which a processor is busy before a task that does not follow on another at once.
        coordination: who batches messages; None for nobody. It changes, and so do the tasks it batches.
    """
    n = tasks.kind.size
    in_heap = np.bincount(tasks.processor, minlength=num_processors)
    state = _State(
        # Beside its predecessors, the first tasks wait for the graph to begin, and a recv for its message too.
        pending=np.where(tasks.kind == RECV, 2, np.maximum(tasks.pending, 1)),
        heap_keys=np.empty(n, np.int64),
        heap_tasks=np.empty(n, np.int64),
        heap_at=np.concatenate([[0], np.cumsum(in_heap)]).astype(np.int64),
        heap_size=np.zeros(num_processors, np.int64),
        idle=np.ones(num_processors, np.int64),
        cores=np.array([num_processors if cores is None else cores], np.int64),
        waiting=np.empty(num_processors + 1, np.int64),
        waiting_ends=np.zeros(2, np.int64),
        is_waiting=np.zeros(num_processors, np.bool_),
        worked_until=np.full(num_processors, -1.0),
        wake=np.array([wake_seconds]),
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
        processor_busy=np.zeros(num_processors),
        channel_busy=np.zeros(num_channels),
    )
    run(tasks, state, trail, unbatched() if coordination is None else coordination)
    assert trail.ended.min(initial=0.0) >= 0, f"{int((trail.ended < 0).sum())} of {n} tasks never ended"
    return trail
