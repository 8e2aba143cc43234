"""The tasks of a simulated step as arrays: the input of the event loop."""

# Shapes: N = tasks, G = graphs, S = successors, D = deliveries.

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Tasks(NamedTuple):
    """All tasks of all ranks. A `..._at` array holds the first index of each task's or graph's entries.

    Attributes:
        kind: COMPUTE, SEND, RECV, or HAND for handing a frame to the processor that sends it (N).
        processor: Processor that runs the task (N).
        priority: Priority of its graph; lower goes first (N).
        pending: Number of predecessors in its graph (N).
        seconds: Duration on the processor (N).
        occupancy: Seconds that it keeps the processor from other tasks (N).
        successors_at, successors: Tasks that follow each task (N + 1, S).
        graph_at: First task of each graph (G + 1).
        graph_ready: Time at which each graph may begin (G).
        channel: Channel of the message of a send or recv (N).
        wire_seconds: Duration of the message on the channel (N).
        wire_occupancy: Seconds that it keeps the channel from other messages (N).
        ack_seconds: Seconds that its acknowledgements keep the opposite channel, 2c for 2c + 1, from others (N).
        group: Group of messages that follow one another at full duration (N).
        latency: Seconds from the channel of a send to that of the receiver (N).
        deliveries_at, deliveries: Recvs that a send ends (N + 1, D).
    """

    kind: np.ndarray
    processor: np.ndarray
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
    ack_seconds: np.ndarray
    group: np.ndarray
    latency: np.ndarray
    deliveries_at: np.ndarray
    deliveries: np.ndarray
