"""The tasks of a simulated step as arrays: the input of the event loop."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Tasks(NamedTuple):
    """All tasks of all ranks. N tasks, G graphs, S successors, D deliveries.

    Attributes:
        kind: COMPUTE, SEND, RECV, or HAND for handing a frame to another processor, which sends it (N).
        processor: which one runs it (N).
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
        ack_seconds: for which its acknowledgements keep the channel of the other direction, 2c for 2c + 1, from
            others (N).
        group: messages that follow one another in full on that channel (N).
        latency: of a send: seconds from its channel to the receiver's (N).
        deliveries_at, deliveries: the recvs that a send ends (N + 1, D).
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
