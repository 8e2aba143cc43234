"""The builder: strategies use it to add operations for the chunks of a job.

A strategy decides who sends which chunk to whom. The builder adds what the compressor needs: preliminary rounds, and
frames of the right kind. What an operation computes is in the codecs (`gradwire.sync.codec`).
"""

# Shapes: W = ranks.

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradwire.compressors.base import SummableCompressor
from gradwire.sync.chunk import Chunk
from gradwire.sync.fusion import FusionLayout
from gradwire.sync.job import TensorLayout
from gradwire.sync.nodes import Nodes
from gradwire.sync.operations import Draft, Operations
from gradwire.wire.frame import FrameKind


class Builder(Draft):
    """Adds the operations of one job on one rank. Methods return the index of an operation.

    Args:
        layout: What is synchronized. Fusion groups are for all-gather and scatter-reduce only.
        rank: This rank.
        world_size: Number of ranks.
        nodes: Returns the ranks of each node; None if every rank is a node.
    """

    def __init__(
        self,
        layout: TensorLayout | FusionLayout,
        rank: int,
        world_size: int,
        nodes: Callable[[], Nodes] | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.rank = rank
        self.world_size = world_size
        self._compressor = layout.entry.compressor
        self._is_summable = isinstance(self._compressor, SummableCompressor)
        self._find_nodes = nodes
        self._first_stage = self._num_encoders = 0
        self._node_sums: dict[int, tuple[int, list[int]]] = {}  # by chunk: the sum, and the ranks that have one
        self._owners: dict[int, int] = {}  # by chunk
        self._group_round: int | None = None  # the end of a fusion group's preliminary round

    def chunks(self) -> list[Chunk]:
        """Return the chunks of a job without owners, except empty ones."""
        return [chunk for chunk in self.layout.chunks(1) if chunk.count]

    def owned_chunks(self) -> list[tuple[int, Chunk]]:
        """Return the chunks of a job, except empty ones, each with its owner.

        Owners rotate from chunk to chunk and from tensor to tensor, so that with fewer chunks than ranks, or with short
        ones, not always the same rank is spared. Each rank begins with the chunks of the next rank and ends with its
        own, so that not all ranks send to the same owner first.
        """
        chunks, W = self.layout.chunks(self.world_size), self.world_size
        turns = max(W, len(chunks))
        first = self.rank + 1 - self.layout.rotation
        ordered = sorted(chunks, key=lambda chunk: (chunk.index - first) % turns)
        found = [((chunk.index + self.layout.rotation) % W, chunk) for chunk in ordered if chunk.count]
        self._owners = {chunk.index: owner for owner, chunk in found}
        return found

    @property
    def peers(self) -> list[int]:
        """The other ranks, starting with the next one, so that not all ranks send to the same one first."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    @property
    def nodes(self) -> Nodes:
        """The ranks of each node."""
        return tuple((rank,) for rank in range(self.world_size)) if self._find_nodes is None else self._find_nodes()

    def operations(self) -> Operations:
        """Return what was added."""
        return Operations(self.ops, self.layout.fields, self._first_stage, self._num_encoders)

    # -- the five primitives ---------------------------------------------------------------------------------

    def start(self, chunk: Chunk, phase: str) -> int:
        """Encode this rank's gradient or its node's sum: the first stage of every path."""
        return self.add("encode", "start", phase, chunk, after=self._before(chunk, True), frame=FrameKind.PAYLOAD)

    def merge(self, chunk: Chunk, payloads: Sequence[int], stage: int, phase: str) -> int:
        """Decode received chunks, add this rank's gradient or its node's sum, and encode the total."""
        encodes_own = self._encodes_own(stage)
        call, after = "encode_and_merge" if encodes_own else "merge", self._before(chunk, encodes_own)
        return self.add("merge", call, phase, chunk, payloads, after, stage, self._kind(stage))

    def _encodes_own(self, stage: int) -> bool:
        """Return whether a rank also encodes its own gradient where it merges."""
        is_first_merge = stage == self._first_stage + 1
        return self._is_summable or (self._compressor.encode_own_before_merge and is_first_merge)

    def decode(self, chunk: Chunk, payload: int, stage: int, phase: str, after: Sequence[int] = ()) -> int:
        """Overwrite the gradient with the mean, after the operations that still need the gradient."""
        return self.add("decode", "decode", phase, chunk, [payload], after, stage)

    def decode_sum(self, chunk: Chunk, payloads: Sequence[int], phase: str) -> int:
        """Overwrite the gradient with the sum of all ranks' payloads, in rank order."""
        return self.add("decode", "decode_sum", phase, chunk, payloads)

    def send(self, payload: int, peer: int, chunk: Chunk, stage: int, phase: str) -> int:
        """Send a payload, made here or received, to `peer`."""
        return self.send_frame(payload, peer, self._kind(stage), chunk, stage, phase)

    def recv(self, peer: int, chunk: Chunk, stage: int, phase: str) -> int:
        """Wait for the payload of one chunk."""
        return self.recv_frame(peer, self._kind(stage), chunk, stage, phase)

    def _kind(self, stage: int) -> FrameKind:
        """Return the kind of the frames that leave a stage."""
        return FrameKind.AGGREGATE if self._is_summable and stage != self._first_stage else FrameKind.PAYLOAD

    # -- dense within a node ---------------------------------------------------------------------------------

    def encode_from(self, stage: int, num_encoders: int) -> None:
        """Compress from `stage` on, on `num_encoders` ranks per chunk. Earlier stages are dense."""
        self._first_stage, self._num_encoders = stage, num_encoders

    def encode_dense(self, chunk: Chunk, phase: str) -> int:
        """Encode this rank's gradient without compression."""
        return self.add("encode", "encode_dense", phase, chunk, frame=FrameKind.PAYLOAD)

    def merge_dense(self, chunk: Chunk, payloads: Sequence[int], members: list[int], phase: str) -> int:
        """Add the dense gradients of the node's other ranks to this rank's. The sum replaces it from now on.

        Args:
            members: Ranks that have such a sum of the chunk.
        """
        total = self.add("merge", "merge_dense", phase, chunk, payloads)
        self._node_sums[chunk.index] = total, members
        return total

    def encode_mean(self, chunk: Chunk, mean: int, decoded: int, phase: str) -> int:
        """Encode the mean without compression. It came with `mean`, and `decoded` has written it."""
        return self.add("encode", "encode_mean", phase, chunk, [mean], [decoded], frame=FrameKind.PAYLOAD)

    def decode_dense(self, chunk: Chunk, payload: int, phase: str, after: Sequence[int] = ()) -> int:
        """Overwrite the gradient with a mean that is not compressed, after the operations that still need it."""
        return self.add("decode", "decode_dense", phase, chunk, [payload], after)

    def send_dense(self, payload: int, peer: int, chunk: Chunk, stage: int, phase: str) -> int:
        """Send a chunk that is not compressed to `peer`."""
        return self.send_frame(payload, peer, FrameKind.PAYLOAD, chunk, stage, phase, dense=True)

    def recv_dense(self, peer: int, chunk: Chunk, stage: int, phase: str) -> int:
        """Wait for the frame of a chunk that is not compressed."""
        return self.recv_frame(peer, FrameKind.PAYLOAD, chunk, stage, phase, dense=True)

    # -- the preliminary round -------------------------------------------------------------------------------

    def _before(self, chunk: Chunk, encoded: bool) -> list[int]:
        """Return the operations after which this rank can encode or add its contribution to a chunk.

        Adds a preliminary round, if the compressor needs one. Small statistics go to all ranks, in one round for all
        tensors of a fusion group; large ones are reduced by the owner of a chunk, if it has one.

        Args:
            encoded: Whether this rank encodes its gradient of the chunk, instead of only adding it.
        """
        sums, members = [], list(range(self.world_size))
        if chunk.index in self._node_sums:
            total, members = self._node_sums[chunk.index]
            sums = [total]
        if not self._compressor.needs_stats:
            return sums
        if self._compressor.stats_at_owner and self._owners:
            return [*sums, self._round_at_owner(chunk, encoded, sums, members)]
        if isinstance(self.layout, FusionLayout) and not self._compressor.stats_at_owner:
            if self._group_round is None:
                encodes_all = not self._owners or self._encodes_own(self._first_stage + 1)
                self._group_round = self._preliminary_round(self.layout.whole, encodes_all, [], members)
            return [self._group_round]
        return [*sums, self._preliminary_round(chunk, encoded, sums, members)]

    def _preliminary_round(self, chunk: Chunk, encoded: bool, after: Sequence[int], members: Sequence[int]) -> int:
        """Send statistics of a chunk to all other members, and reduce those of all."""
        call, stage = "stats" if encoded else "stats_of_gradient", self._first_stage
        mine = self.add("encode", call, "encode stats", chunk, after=after, frame=FrameKind.STATS)
        rows = {self.rank: mine}
        for peer in (peer for peer in self.peers if peer in members):
            self.send_frame(mine, peer, FrameKind.STATS, chunk, stage, "send stats")
            rows[peer] = self.recv_frame(peer, FrameKind.STATS, chunk, stage, "recv stats")
        return self.add("merge", "reduce_stats", "merge stats", chunk, [rows[rank] for rank in members])

    def _round_at_owner(self, chunk: Chunk, encoded: bool, after: Sequence[int], members: Sequence[int]) -> int:
        """Send statistics of a chunk to its owner, which reduces those of all members and sends them the result."""
        call, stage, owner = "stats" if encoded else "stats_of_gradient", self._first_stage, self._owners[chunk.index]
        mine = self.add("encode", call, "encode stats", chunk, after=after, frame=FrameKind.STATS)
        if owner != self.rank:
            self.send_frame(mine, owner, FrameKind.STATS, chunk, stage, "send stats")
            reduced = self.recv_frame(owner, FrameKind.STATS, chunk, stage, "recv reduced stats")
            return self.add("decode", "take_reduced_stats", "decode reduced stats", chunk, [reduced])
        others = [peer for peer in self.peers if peer in members]
        rows = {peer: self.recv_frame(peer, FrameKind.STATS, chunk, stage, "recv stats") for peer in others}
        rows[owner] = mine
        ordered = [rows[rank] for rank in members]
        reduced = self.add("merge", "merge_stats", "merge stats", chunk, ordered, frame=FrameKind.STATS)
        for peer in others:
            self.send_frame(reduced, peer, FrameKind.STATS, chunk, stage, "send reduced stats")
        return reduced
