"""The replica check: ranks exchange a hash of their parameters and compare, beside the gradients' own frames.

Guarantees: replicas that differ in one bit are found at the next check, but for a chance of 2⁻³². It costs one read of
the parameters (CRC-32C runs far above memory speed of a slow network's gradients) and 76 bytes a pair of ranks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from functools import partial

import google_crc32c
import numpy as np
import torch

from gradwire.core.errors import ReplicaError
from gradwire.core.events import Event, EventStream
from gradwire.core.spec import as_array
from gradwire.sync.graph import FrameKey, Task, TaskGraph
from gradwire.transport.base import Transport
from gradwire.wire.frame import HEADER_BYTES, FrameKind, Header

REPLICA_TENSOR = 0xFFFF_FFFF  # the tensor id of hashes


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32C over the bytes of all tensors in their order."""
    checksum = 0
    for tensor in tensors:
        checksum = google_crc32c.extend(checksum, as_array(tensor.cpu()).view(np.uint8))
    return checksum


def build(graph: TaskGraph, mine: int, transport: Transport, events: EventStream) -> None:
    """Add the exchange of one hash to `graph`.

    On failure: the graph's last task raises `ReplicaError`, which names the ranks that differ from the majority.
    """
    rank = transport.rank
    peers = [peer for peer in range(transport.world_size) if peer != rank]
    body = np.array([mine], dtype="<u4").view(np.uint8)
    header = Header(
        FrameKind.STATS, sender=rank, epoch=transport.epoch, round=graph.round, tensor=REPLICA_TENSOR, count=1
    )
    arrivals: dict[int, Task] = {}

    def send(peer: int) -> None:
        transport.send(peer, header, body)
        nbytes = HEADER_BYTES + body.nbytes
        events.emit(Event("send", time.monotonic(), tensor=graph.name, round=graph.round, nbytes=nbytes, peer=peer))

    for peer in peers:
        graph.add("send", "send hash", partial(send, peer), peer=peer)
        key = FrameKey(peer, FrameKind.STATS, graph.round, REPLICA_TENSOR, 0, 0)
        arrivals[peer] = graph.recv("recv hash", key)

    def compare() -> None:
        hashes = {peer: int(task.value.body.view("<u4")[0]) for peer, task in arrivals.items()} | {rank: mine}
        common, _ = Counter(hashes[peer] for peer in sorted(hashes)).most_common(1)[0]
        odd = sorted(peer for peer, value in hashes.items() if value != common)
        if odd:
            raise ReplicaError(
                f"Expected identical parameters on all ranks, got others on rank {', '.join(map(str, odd))}. Do: look "
                "for code that changes parameters on some ranks only, or broadcast them from one rank and go on.",
                rank=odd[0],
                tensor="parameters",
                phase="replica check",
            )

    graph.add("merge", "compare hash", compare, list(arrivals.values()))
