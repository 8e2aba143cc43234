"""The exchange: a few numbers of every rank, sent to all ranks next to the gradients.

Decisions that all ranks must make together during training (are the replicas equal, is another plan better) are made by
each rank from the same numbers in rank order. No rank leads, and none can decide differently.
"""

# Shapes: W = ranks, K = numbers of a rank.

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from gradwire.core.errors import SyncError
from gradwire.sync.chunk import Chunk
from gradwire.sync.operations import Draft, FrameFields, Operations
from gradwire.sync.run import Run
from gradwire.wire.frame import FrameKind
from gradwire.wire.payload import Payload

# Tensor ids of frames that hold no tensor.
EXCHANGE_TENSOR = 0xFFFF_FFFF  # numbers of this module
PROBE_TENSOR = 0xFFFF_FFFE  # frames that measure a link
MAX_NUMBERS = 64
PROBE_BYTES = 64 * 1024


class ExchangeRun(Run):
    """The exchange of one vector.

    Args:
        mine: Numbers of this rank, float64[K]. K is at most `MAX_NUMBERS` and the same on all ranks.
        rank: This rank.
        world_size: Number of ranks.
        use: Called with the numbers of all ranks, float64[W, K]. An error that it raises ends the job.
        what: Name of the operations, for example ``"hash"``.
        name: Name of the run, for reports.
        round: Number of the run, the same on all ranks.
        on_done: Called at the end.
        on_failed: Called instead if the engine fails.
    """

    def __init__(
        self,
        mine: np.ndarray,
        rank: int,
        world_size: int,
        use: Callable[[np.ndarray], None],
        what: str,
        name: str,
        round: int,
        on_done: Callable[[], None] = lambda: None,
        on_failed: Callable[[SyncError], None] = lambda error: None,
    ) -> None:
        codec = _ExchangeCodec(mine, rank, world_size, use)
        super().__init__(_operations(rank, world_size, mine.size, what), codec, name, round)
        self._on_done = on_done
        self._on_failed = on_failed

    def on_done(self) -> None:
        self._on_done()

    def on_failed(self, error: SyncError) -> None:
        self._on_failed(error)


@functools.cache
def _operations(rank: int, world_size: int, count: int, what: str) -> Operations:
    draft, numbers, rows = Draft(), Chunk(0, 0, count), []
    mine = draft.add("encode", "start", f"encode {what}", numbers)
    for step in range(1, world_size):
        peer = (rank + step) % world_size
        draft.send_frame(mine, peer, FrameKind.STATS, numbers, 0, f"send {what}")
        rows.append(draft.recv_frame(peer, FrameKind.STATS, numbers, 0, f"recv {what}"))
    draft.add("merge", "gather", f"compare {what}", numbers, rows)
    return Operations(draft.ops, FrameFields(EXCHANGE_TENSOR))


class _ExchangeCodec:
    def __init__(self, mine: np.ndarray, rank: int, world_size: int, use: Callable[[np.ndarray], None]) -> None:
        self._mine = mine
        self._rank = rank
        self._world_size = world_size
        self._use = use

    def start(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        return Payload(np.ascontiguousarray(self._mine, dtype="<f8").view(np.uint8))

    def gather(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> None:
        rows = np.empty((self._world_size, self._mine.size))
        rows[self._rank] = self._mine
        for payload in payloads:
            theirs = payload.body.view("<f8")
            if theirs.size != self._mine.size:
                raise SyncError(
                    f"Rank {payload.sender} sent {theirs.size} numbers instead of {self._mine.size}. Make the same "
                    "gradwire calls on every rank.",
                    rank=payload.sender,
                )
            rows[payload.sender] = theirs
        self._use(rows)
