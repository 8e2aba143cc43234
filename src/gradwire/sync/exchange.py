"""The exchange: a few numbers of every rank, sent to all ranks next to the gradients.

Decisions that all ranks must make together during training (are the replicas equal, is another plan better) are made by
each rank from the same numbers in rank order. No rank leads, and none can decide differently.
"""

# Shapes: W = ranks, K = numbers of a rank.

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from gradwire.core.errors import SyncError
from gradwire.core.events import Event, EventStream
from gradwire.net.transport import Transport
from gradwire.sync.graph import FrameKey, Task, TaskGraph
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header

# Tensor ids of frames that hold no tensor.
EXCHANGE_TENSOR = 0xFFFF_FFFF  # numbers of this module
PROBE_TENSOR = 0xFFFF_FFFE  # frames that measure a link
MAX_NUMBERS = 64
PROBE_BYTES = 64 * 1024


def build(
    graph: TaskGraph,
    mine: np.ndarray,
    transport: Transport,
    events: EventStream,
    use: Callable[[np.ndarray], None],
    what: str,
) -> None:
    """Add the exchange of one vector to `graph`.

    Args:
        graph: Graph whose last task calls `use`.
        mine: Numbers of this rank, float64[K]. K is at most `MAX_NUMBERS` and the same on all ranks.
        transport: Transport of the frames.
        events: Stream on which the sends are recorded.
        use: Called with the numbers of all ranks, float64[W, K]. An error that it raises ends the job.
        what: Name of the tasks, for example ``"hash"``.
    """
    rank, world_size = transport.rank, transport.world_size
    body = np.ascontiguousarray(mine, dtype="<f8").view(np.uint8)
    header = Header(
        FrameKind.STATS, sender=rank, epoch=transport.epoch, round=graph.round, tensor=EXCHANGE_TENSOR, count=mine.size
    )
    arrivals: dict[int, Task] = {}

    def send(peer: int) -> None:
        transport.send(peer, header, body)
        nbytes = HEADER_BYTES + body.nbytes
        events.emit(Event("send", time.monotonic(), tensor=graph.name, round=graph.round, nbytes=nbytes, peer=peer))

    for step in range(1, world_size):
        peer = (rank + step) % world_size
        graph.add("send", f"send {what}", partial(send, peer), peer=peer)
        key = FrameKey(peer, FrameKind.STATS, graph.round, EXCHANGE_TENSOR, 0, 0)
        arrivals[peer] = graph.recv(f"recv {what}", key)

    def gather() -> None:
        rows = np.empty((world_size, mine.size))
        rows[rank] = mine
        for peer, task in arrivals.items():
            theirs = task.value.body.view("<f8")
            if theirs.size != mine.size:
                raise SyncError(
                    f"Rank {peer} sent {theirs.size} numbers instead of {mine.size}. Make the same gradwire calls on "
                    "every rank.",
                    rank=peer,
                )
            rows[peer] = theirs
        use(rows)

    graph.add("merge", f"compare {what}", gather, list(arrivals.values()))
