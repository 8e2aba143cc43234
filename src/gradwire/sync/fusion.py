"""Tensor fusion: small tensors of one submission share operations and frames.

The cost of an operation, a frame and a wake-up is paid once for many tensors. There are two kinds of groups:

- Dense tensors, unchanged or cast to 16 bits, are one flat tensor to compressor and strategy. If they are neighbors in
  memory, as in a bucket of DDP that is dense as a whole, that memory is used in place. Such a group keeps no residuals,
  because none of its compressors needs any; what an earlier plan or a loaded state has left of its tensors is added.
- Compressed tensors with one partition. They keep their own payloads, statistics, random streams and residuals, so a
  group gives the same values as its tensors would one by one. A chunk of a group holds full tensors. If chunks have
  owners, each tensor has one, the same in every group. A preliminary round is one for the whole group, unless owners
  reduce its statistics.

Source: HiPress (SOSP 2021), sections 3.2 and 3.4: batch compression and bulk communication. Differences: groups are
those of a submission, so there is no coordinator. What is fused follows from the partitions of the plan, which the
planner chooses by cost.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from gradwire.residuals import policies
from gradwire.residuals.policies import Policy
from gradwire.residuals.slices import ResidualKey
from gradwire.residuals.transaction import Residuals
from gradwire.sync.chunk import Chunk
from gradwire.sync.job import TensorLayout, group_name, job_detail
from gradwire.sync.operations import Operations
from gradwire.sync.optimizer_view import OptimizerView
from gradwire.sync.plan_entry import MAX_RANGE_ELEMENTS, PlanEntry

FUSION_FLAG = 1 << 31  # set in the tensor id of a group; the other bits are the id of its first tensor
FUSION_STRATEGIES = ("allgather", "scatter_reduce", "sparse_reduce")
LENGTH_BYTES = 4  # of each tensor's payload in a message; see `gradwire.sync.fusion_codec`


def can_be_fused(entry: PlanEntry) -> bool:
    """Whether compressed tensors with this entry can be fused, if they have one partition."""
    is_dense = entry.compressor.exact and not policies.get(entry.feedback).has_velocity
    return not is_dense and not entry.batched and entry.strategy in FUSION_STRATEGIES


def is_fused(entry: PlanEntry, numel: int) -> bool:
    """Whether a compressed tensor is fused with others of its submission. Lengths in a body bound its size."""
    return entry.partitions == 1 and numel <= MAX_RANGE_ELEMENTS and can_be_fused(entry)


def rotations(tensors: Iterable[tuple[PlanEntry, int]]) -> list[int]:
    """Return who owns the first range of each tensor, modulo the number of ranks.

    Each tensor begins one rank after the one before that is cut into as many ranges. So every rank owns as many ranges
    as any other, whatever stands between them.

    Args:
        tensors: Entry and number of elements of each tensor, in the agreed order.
    """
    counts, found = Counter[tuple[int | None, bool]](), []
    for entry, numel in tensors:
        kind = entry.partitions, is_fused(entry, numel)
        found.append(counts[kind])
        counts[kind] += 1
    return found


class FusionLayout:
    """What stays the same from step to step of a group of compressed tensors.

    Args:
        members: Tensors with the same plan entry and element type. The same on all ranks.

    Attributes:
        operations: How it is synchronized; set once all else is known.
        fields: Header fields of its frames.
        detail: Event detail of its submissions.
        prepared: Arguments of compiled calls by chunk, which the codec adds.
        members_of_chunk: Indices of the tensors in each chunk and, last, in the whole group.
    """

    operations: Operations
    offset = 0
    rotation = 0

    def __init__(self, members: Sequence[TensorLayout]) -> None:
        self.members = members
        self.entry = members[0].entry
        self.dtype = members[0].dtype
        self.names = [member.name for member in members]
        self.name = group_name(self.names)
        self.count = sum(member.count for member in members)
        self.detail = job_detail(self.entry, self.count, self.names)
        self.tensor = members[0].tensor | FUSION_FLAG
        self.nbytes = self.count * self.dtype.itemsize
        self.fields = members[0].fields._replace(tensor=self.tensor, offset=0, members=_hash_of(members))
        self.prepared: dict[int, Any] = {}
        self.members_of_chunk: list[list[int]] = []

    def chunks(self, shares: int) -> list[Chunk]:
        """Return one chunk of full tensors per share. Some may be empty.

        A tensor has the same owner in every group, because residuals must not depend on buckets.
        """
        if len(self.members_of_chunk) != shares + 1:
            self.prepared.clear()
            self.members_of_chunk = [[] for _ in range(shares)]
            for index, member in enumerate(self.members):
                self.members_of_chunk[member.rotation % shares].append(index)
            self.members_of_chunk.append(list(range(len(self.members))))
        counts = [sum(self.members[index].count for index in indices) for indices in self.members_of_chunk[:-1]]
        return [Chunk(index, 0, count) for index, count in enumerate(counts)]

    @property
    def policy(self) -> Policy:
        """How residuals are used: of all its members, if this rank holds some of one that the plan would not send."""
        return self.members[0].policy

    @property
    def whole(self) -> Chunk:
        """All tensors, for the preliminary round. Its index follows those of the latest `chunks`."""
        return Chunk(len(self.members_of_chunk) - 1, 0, self.count)


class DenseGroup(NamedTuple):
    """Dense tensors that travel as one flat tensor.

    Attributes:
        layout: The flat tensor.
        members: What it consists of, in this order.
    """

    layout: TensorLayout
    members: Sequence[TensorLayout]

    @classmethod
    def of(cls, members: Sequence[TensorLayout]) -> DenseGroup:
        """Return the group of tensors with the same plan entry and element type."""
        first, count = members[0], sum(member.count for member in members)
        names = [member.name for member in members]
        # On a ring, the order of additions depends on where a range begins. It must not depend on buckets, which are
        # others after a restart.
        rotation = 0 if first.entry.strategy == "ring" else first.rotation
        layout = TensorLayout(
            group_name(names), first.tensor | FUSION_FLAG, first.entry, first.dtype, count, rotation=rotation
        )
        layout.names, layout.counts = names, [member.count for member in members]
        layout.members = _hash_of(members)
        layout.detail = job_detail(first.entry, count, names)
        return cls(layout, members)


def _hash_of(members: Sequence[TensorLayout]) -> int:
    """CRC-32 of the tensors and ranges of a group. Ranks that group others must not add them up."""
    return zlib.crc32(repr([(each.tensor, each.offset, each.count) for each in members]).encode())


def flush_residuals(
    members: Sequence[TensorLayout], values: torch.Tensor, used: Sequence[bool], residuals: Residuals, world_size: int
) -> None:
    """Add the residuals of dense tensors to their values. What 16 bits cannot hold becomes the new residual."""
    start = 0
    for member, is_used in zip(members, used, strict=True):
        piece = values[start : start + member.count]
        start += member.count
        key = ResidualKey(member.name, member.range)
        left = residuals.source(key) if is_used and residuals.holds_after_pruning(member.name) else None
        if left is not None:
            # Residuals are in units of the mean; the gradient is not scaled yet.
            total = piece.to(torch.promote_types(values.dtype, torch.float32)) + world_size * torch.from_numpy(left)
            piece.copy_(total)
            torch.from_numpy(residuals.stage(key)).copy_((total - piece) / world_size)


class FusionGroup:
    """A `FusionLayout` in one step. Strategies and the engine take it for a `TensorJob`.

    Args:
        layout: What stays the same.
        tensors: Contiguous CPU tensors of the members: the gradients at first, the means over ranks at the end.
        used: Whether this rank's backward pass used each of them.
        round: Number of the job, the same on all ranks.
        step: Synchronization step.
        aux: Gives `Context.aux`; None if the compressor needs no optimizer.

    Attributes:
        nonfinite, mismatch: See `TensorJob`.
    """

    def __init__(
        self,
        layout: FusionLayout,
        tensors: Sequence[torch.Tensor],
        used: Sequence[bool],
        round: int,
        step: int,
        aux: OptimizerView | None = None,
    ) -> None:
        self.layout = layout
        self.tensors = tensors
        self.used = used
        self.round = round
        self.step = step
        self.aux = aux
        self.nonfinite = False
        self.mismatch = False

    @property
    def pieces(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Its tensors by name."""
        return zip(self.layout.names, self.tensors, strict=True)

    def members_of(self, chunk: Chunk) -> list[int]:
        """Return the indices of the members in a chunk."""
        return self.layout.members_of_chunk[chunk.index]


class SubmissionLayout:
    """What stays the same from step to step of a submission: which of its tensors travel together.

    What travels together follows from the plan, which all ranks share, and not from the residuals of this rank.

    Args:
        members: Its tensors, without empty ones, each with the number of elements of the full tensor.
        flushed: Names of tensors of which this rank holds residuals that the plan would not send. They are sent once.

    Attributes:
        single: Tensors that travel alone.
        groups: Compressed fusion groups.
        dense: Dense groups.
        without_feedback: Names of compressed tensors that keep no residuals.
    """

    def __init__(self, members: Iterable[tuple[TensorLayout, int]], flushed: Collection[str] = ()) -> None:
        self.single: list[TensorLayout] = []
        self.without_feedback: list[str] = []
        dense: dict[object, list[TensorLayout]] = {}
        groups: dict[object, list[TensorLayout]] = {}
        for member, full_count in members:
            entry = member.entry
            key = repr(entry.compressor), entry.strategy, entry.feedback, entry.partitions, member.dtype
            if entry.batched:
                dense.setdefault(key, []).append(member)
                continue
            if entry.feedback == "none" and not entry.adds_in_place:  # residuals of dense tensors are added to them
                self.without_feedback.append(member.name)
            if is_fused(entry, full_count):
                groups.setdefault(key, []).append(member)
            else:
                self.single.append(member)
        for together in [*groups.values(), *([each] for each in self.single)]:
            if any(each.name in flushed for each in together):
                for each in together:
                    each.flushes = True
        self.groups = [FusionLayout(group) for group in groups.values()]
        self.dense = [DenseGroup.of(group) for group in dense.values()]

    @property
    def jobs(self) -> list[TensorLayout | FusionLayout]:
        """The jobs of the submission."""
        return [*self.single, *(group.layout for group in self.dense), *self.groups]
