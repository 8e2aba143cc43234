"""The discrete-event engine: the operations of many ranks in virtual time.

A processor has one queue, like `gradwire.sync.engine`: sends first, then lower priority numbers, then the order in
which tasks became ready. A running task is not interrupted. A message waits for the sender's channel, travels for the
latency, and waits for the receiver's channel. Channels serve messages in order at their full rate, and both ends work
at once: a message that finds both free takes its size over the slower rate, once.

TCP serves connections that share a link side by side. That changes which of several messages comes first, but not when
the last one comes, and a step waits for the last. Switches hold what a receiver cannot take yet; TCP's back pressure
has the same effect if the sender has other messages to send. A link with `queue_bytes` loses what its switch cannot
hold (`gradwire.simulate.cluster.SimulatedLink`).

Every task has a duration and an occupancy, and so has every message. They differ only if one simulated rank stands for
many that do not all have the task (`gradwire.simulate.fold`): the task takes its whole duration, and keeps the resource
from others for the mean over those ranks. Messages of one group follow one another in full.

Guarantees: the same input gives the same output, to the bit. Ties are broken by the order in which events became known.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradwire.simulate.assemble import Assembled
from gradwire.simulate.bulk import Coordination
from gradwire.simulate.cluster import Cluster
from gradwire.simulate.loop import RECV, run


class Trail(NamedTuple):
    """When everything happened, in seconds from the beginning.

    Attributes:
        started: When the processor began a task; for a recv without work, when the message had arrived (N).
        ended: When the task ended (N).
        wire_started: When the message began on its channel (N).
        wire_ended: When the message had left its channel (N).
        cause: Last predecessor to end, or -1 for the beginning of the graph (N).
        processor_busy: Busy seconds of each processor.
        channel_busy: Busy seconds of each channel.
        lost: Number of bursts that were lost (1).
    """

    started: np.ndarray
    ended: np.ndarray
    wire_started: np.ndarray
    wire_ended: np.ndarray
    cause: np.ndarray
    processor_busy: np.ndarray
    channel_busy: np.ndarray
    lost: np.ndarray


class _State(NamedTuple):
    """What changes during a run."""

    pending: np.ndarray
    heap_keys: np.ndarray  # ready tasks: one heap per processor, one after another
    heap_tasks: np.ndarray
    heap_at: np.ndarray
    heap_size: np.ndarray
    idle: np.ndarray  # by processor
    cores: np.ndarray  # number of free cores
    waiting: np.ndarray  # processors that wait for a core: a ring buffer with two ends, and a flag per processor
    waiting_ends: np.ndarray
    is_waiting: np.ndarray
    worked_until: np.ndarray  # by processor: end of its last task
    wake: np.ndarray  # seconds
    channel_free: np.ndarray
    group_free: np.ndarray
    last_byte: np.ndarray  # by recv: when the end of its message reaches the receiver's channel
    sender: np.ndarray  # by recv: the send of its message
    order: np.ndarray


def simulate(assembled: Assembled, cluster: Cluster, batching: Coordination) -> Trail:
    """Run all graphs to their end.

    Args:
        assembled: Tasks to run.
        cluster: Machines, for their cores and what waking a thread costs.
        batching: Batching of messages. It changes, and so do the times of tasks that it batches.
    """
    tasks, num_processors = assembled.tasks, assembled.num_processors
    n = tasks.kind.size
    in_heap = np.bincount(tasks.processor, minlength=num_processors)
    state = _State(
        # First tasks also wait for the graph to begin, and a recv for its message.
        pending=np.where(tasks.kind == RECV, 2, np.maximum(tasks.pending, 1)),
        heap_keys=np.empty(n, np.int64),
        heap_tasks=np.empty(n, np.int64),
        heap_at=np.concatenate([[0], np.cumsum(in_heap)]).astype(np.int64),
        heap_size=np.zeros(num_processors, np.int64),
        idle=np.ones(num_processors, np.int64),
        cores=np.array([num_processors if cluster.cores is None else cluster.cores], np.int64),
        waiting=np.empty(num_processors + 1, np.int64),
        waiting_ends=np.zeros(2, np.int64),
        is_waiting=np.zeros(num_processors, np.bool_),
        worked_until=np.full(num_processors, -1.0),
        wake=np.array([cluster.wake_seconds]),
        channel_free=np.zeros(assembled.num_channels),
        group_free=np.zeros(assembled.num_groups),
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
        channel_busy=np.zeros(assembled.num_channels),
        lost=np.zeros(1, np.int64),
    )
    run(tasks, state, trail, batching)
    assert trail.ended.min(initial=0.0) >= 0, f"{int((trail.ended < 0).sum())} of {n} tasks never ended"
    return trail
