"""Tensor fusion: small tensors of one submission share tasks and messages.

The cost of a task, a frame and a wake-up is paid once for many tensors. There are two kinds of groups:

- Dense tensors, unchanged or cast to 16 bits, are one flat tensor to compressor and strategy. If they are neighbors in
  memory, as in a bucket of DDP that is dense as a whole, that memory is used in place. Such a group keeps no residuals,
  because none of its compressors needs any; what an earlier plan or a loaded state has left of its tensors is added.
- Compressed tensors keep their own payloads, statistics, random streams and residuals, so a group gives the same values
  as its tensors would one by one, unsplit. A chunk of a group holds full tensors. If chunks have owners, each tensor
  has one, the same in every group. So a small tensor has one scale, whereas each range of a large one has its own.

Body of a message of compressed tensors: one uint32 per tensor (the bytes of its payload; bit 31 if the sender's
backward pass used it, bit 30 if it was not finite), then the payloads.

Source: HiPress (SOSP 2021), sections 3.2 and 3.4: batch compression and bulk communication. Differences: groups are
those of a submission, so there is no coordinator and no size threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np
import torch

from gradwire.compressors.base import SummableCompressor
from gradwire.core.errors import PayloadError
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.residuals import policies
from gradwire.residuals.transaction import ResidualKey, Residuals
from gradwire.sync.codec import EMPTY, PayloadCodec, blame, make_codec
from gradwire.sync.job import Chunk, EncodedChunk, TensorJob, group_name
from gradwire.sync.plan_entry import PlanEntry
from gradwire.wire.frame import FrameFlags, FrameKind

FUSION_FLAG = 1 << 31  # set in the tensor id of a group; the other bits are the id of its first tensor
MAX_FUSED_ELEMENTS = 1 << 17  # half a megabyte: above this, encoding a tensor takes longer than sending a frame
FUSION_STRATEGIES = ("allgather", "scatter_reduce")

_USED, _NONFINITE = 1 << 31, 1 << 30
_LENGTH = _NONFINITE - 1


def is_fused(entry: PlanEntry, numel: int) -> bool:
    """Whether a compressed tensor is fused with others of its submission. It is not split even if it is alone."""
    codec = entry.compressor
    is_dense = codec.exact and not policies.get(entry.feedback).has_velocity
    plain = not (is_dense or codec.needs_stats or isinstance(codec, SummableCompressor) or codec.requires_full_tensor)
    alone = entry.batched or entry.partitions > 1 or numel > MAX_FUSED_ELEMENTS
    return plain and not alone and entry.strategy in FUSION_STRATEGIES


def max_message_bytes(max_payload_bytes: Iterable[int]) -> int:
    """Return the most bytes of a message, from the most bytes of each payload in it."""
    return sum(4 + each for each in max_payload_bytes)


@dataclass(frozen=True)
class Member:
    """What stays the same from step to step of a tensor in a group.

    Attributes:
        index: Index in the submission.
        name: Parameter name.
        tensor: Index of the tensor in the agreed order of names.
        offset: Global element index of the first value.
        count: Number of values.
        shape: Shape of the full tensor.
        fusion_index: Index among the tensors that are fused. It decides who owns the tensor, whatever the buckets are.
    """

    index: int
    name: str
    tensor: int
    offset: int
    count: int
    shape: tuple[int, ...] | None = None
    fusion_index: int = 0

    @property
    def range(self) -> ElementRange:
        """Global elements."""
        return ElementRange(self.offset, self.count)


class FusionLayout:
    """What stays the same from step to step of a group.

    Args:
        members: Tensors with the same compressor, strategy and feedback. The same on all ranks.
        entry: Their plan entry.
        dtype: Their element type.

    Attributes:
        prepared: Arguments of compiled calls by chunk, which the codec adds.
    """

    def __init__(self, members: Sequence[Member], entry: PlanEntry, dtype: torch.dtype) -> None:
        self.members = members
        self.entry = entry
        self.dtype = dtype
        self.names = [member.name for member in members]
        self.name = group_name(self.names)
        self.tensor = members[0].tensor | FUSION_FLAG
        self.num_elements = sum(member.count for member in members)
        self.nbytes = self.num_elements * dtype.itemsize
        self.prepared: dict[int, Any] = {}
        self.members_of_chunk: list[list[int]] = []

    def chunks(self, num_chunks: int) -> list[Chunk]:
        """Return `num_chunks` chunks of full tensors. Some may be empty.

        A tensor has the same owner in every group, because residuals must not depend on buckets.
        """
        if len(self.members_of_chunk) != num_chunks:
            self.prepared.clear()
            self.members_of_chunk = [[] for _ in range(num_chunks)]
            for index, member in enumerate(self.members):
                self.members_of_chunk[(member.fusion_index - self.tensor) % num_chunks].append(index)
        counts = [sum(self.members[index].count for index in indices) for indices in self.members_of_chunk]
        return [Chunk(index, 0, count) for index, count in enumerate(counts)]


def flush_residuals(
    layout: FusionLayout, values: torch.Tensor, used: Sequence[bool], residuals: Residuals, world_size: int
) -> None:
    """Add the residuals of a dense group's tensors to its values. What 16 bits cannot hold becomes the new residual."""
    start = 0
    for member, is_used in zip(layout.members, used, strict=True):
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
    """Compressed tensors that are synchronized as one. It has the interface of `TensorJob`.

    Args:
        layout: What stays the same from step to step.
        tensors: Contiguous CPU tensors of the members: the gradients at first, the means over ranks at the end.
        used: Whether this rank's backward pass used each of them.
        round: Number of the submission.
        step: Synchronization step.
        wait_loaded: Blocks until the gradients are there, if they come from a GPU.
        aux: Returns `Context.aux` for a parameter and a range; None if the compressor needs no optimizer.
    """

    offset = 0

    def __init__(
        self,
        layout: FusionLayout,
        tensors: Sequence[torch.Tensor],
        used: Sequence[bool],
        round: int,
        step: int,
        wait_loaded: Callable[[], None] = lambda: None,
        aux: Callable[[str, ElementRange], Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        self.layout = layout
        self.aux = aux
        self.tensors = tensors
        self.used = used
        self.round = round
        self.step = step
        self.wait_loaded = wait_loaded
        self.any_nonfinite = False
        self.name, self.tensor, self.entry, self.dtype = layout.name, layout.tensor, layout.entry, layout.dtype
        self.num_elements, self.nbytes = layout.num_elements, layout.nbytes

    @cached_property
    def members(self) -> list[TensorJob]:
        """The tensors as jobs of their own."""
        return [
            TensorJob(
                *(member.name, member.tensor, tensor.view(-1), self.entry, self.round, self.step, member.offset),
                used=used, wait_loaded=self.wait_loaded, shape=member.shape,
                aux=None if self.aux is None else partial(self.aux, member.name),
            )
            for member, tensor, used in zip(self.layout.members, self.tensors, self.used, strict=True)
        ]  # fmt: skip

    @property
    def nonfinite(self) -> bool:
        """Whether the gradient of any rank, or the aggregate, was not finite."""
        return self.any_nonfinite or any(member.nonfinite for member in self.__dict__.get("members", ()))

    def chunks(self, num_chunks: int) -> list[Chunk]:
        """See `FusionLayout`."""
        return self.layout.chunks(num_chunks)

    def members_of(self, chunk: Chunk) -> list[int]:
        """Return the indices of the members in a chunk."""
        return self.layout.members_of_chunk[chunk.index]


class FusionCodec:
    """Encodes, merges and decodes the members one by one. It has the interface of `PayloadCodec`."""

    first_stage = 0

    def __init__(self, group: FusionGroup, residuals: Residuals, rank: int, world_size: int, seed: int) -> None:
        self.group = group
        self.rank = rank
        self._constants = residuals, rank, world_size, seed

    @cached_property
    def _codecs(self) -> list[PayloadCodec]:
        return [make_codec(member, *self._constants) for member in self.group.members]

    def kind(self, stage: int) -> FrameKind:
        return FrameKind.PAYLOAD

    def encodes_own(self, stage: int) -> bool:
        return self.group.entry.compressor.encode_own_before_merge and stage == self.first_stage + 1

    def start(self, chunk: Chunk) -> EncodedChunk:
        return self._join(codec.start(full) for codec, full in self._members(chunk))

    def merge(self, chunk: Chunk, messages: Sequence[EncodedChunk], stage: int) -> EncodedChunk:
        members = zip(self._members(chunk), self._split(chunk, messages), strict=True)
        return self._join(codec.merge(full, received, stage) for (codec, full), received in members)

    def decode(self, chunk: Chunk, message: EncodedChunk, stage: int) -> None:
        for (codec, full), (mean,) in zip(self._members(chunk), self._split(chunk, [message]), strict=True):
            codec.decode(full, mean, stage)

    def decode_sum(self, chunk: Chunk, messages: Sequence[EncodedChunk]) -> None:
        for (codec, full), received in zip(self._members(chunk), self._split(chunk, messages), strict=True):
            codec.decode_sum(full, received)

    def finish(self) -> None:
        for codec in self._codecs:
            codec.finish()

    # -- one message for many tensors ------------------------------------------------------------------------

    def _members(self, chunk: Chunk) -> list[tuple[PayloadCodec, Chunk]]:
        codecs = [self._codecs[index] for index in self.group.members_of(chunk)]
        return [(codec, Chunk(0, 0, codec.job.num_elements)) for codec in codecs]

    def _join(self, messages: Iterable[EncodedChunk]) -> EncodedChunk:
        messages = list(messages)
        marks = [message.body.nbytes | _USED * message.used | _NONFINITE * message.nonfinite for message in messages]
        body = np.concatenate([np.array(marks, "<u4").view(np.uint8), *(message.body for message in messages)])
        flags = reduce(FrameFlags.__or__, (message.flags for message in messages), FrameFlags.PRESENT)
        return EncodedChunk(FrameKind.PAYLOAD, flags, body, self.rank)

    def _split(self, chunk: Chunk, messages: Sequence[EncodedChunk]) -> list[list[EncodedChunk]]:
        """Return the messages of all senders for each member of the chunk."""
        members, columns = self._members(chunk), []
        most = [codec.compressor.max_encoded_bytes(codec.job.spec(full)) for codec, full in members]
        for message in messages:
            with blame(self._codecs[0], message):
                columns.append(_split(message, most))
        return [list(row) for row in zip(*columns, strict=True)]


def _split(message: EncodedChunk, max_bytes: Sequence[int]) -> list[EncodedChunk]:
    """Return the messages in a message.

    Raises:
        PayloadError: Lengths that do not fit the body or the tensors.
    """
    table_bytes = 4 * len(max_bytes)
    if message.body.nbytes < table_bytes:
        raise PayloadError(f"Expected lengths of {len(max_bytes)} payloads, got {message.body.nbytes} bytes.")
    marks = message.body[:table_bytes].view("<u4").astype(np.int64)
    lengths = marks & _LENGTH
    if lengths.sum() != message.body.nbytes - table_bytes or (lengths > max_bytes).any():
        raise PayloadError(
            f"Expected payloads of {message.body.nbytes - table_bytes} bytes together and of at most {max(max_bytes)} "
            f"each, got lengths of {lengths.sum()} together and of at most {lengths.max()}."
        )
    if ((marks != 0) & (marks & _USED == 0)).any():
        raise PayloadError("Expected no bytes of unused tensors, got some.")
    found, start = [], table_bytes
    for mark, length in zip(marks.tolist(), lengths.tolist()):
        flags = FrameFlags.PRESENT
        flags |= FrameFlags.USED if mark & _USED else flags
        flags |= FrameFlags.NONFINITE if mark & _NONFINITE else flags
        body = message.body[start : start + length] if length else EMPTY
        found.append(EncodedChunk(message.kind, flags, body, message.sender))
        start += length
    return found


class SubmissionLayout:
    """What stays the same from step to step of a submission: which of its tensors travel together.

    Args:
        members: Its tensors, without empty ones, with their plan entries, and the number of elements and the element
            type of the full tensors.

    Attributes:
        single: Tensors that travel alone, with their entries.
        groups: Fusion groups, dense ones included.
        without_feedback: Names of compressed tensors that keep no residuals.
    """

    def __init__(self, members: Iterable[tuple[Member, PlanEntry, TensorSpec]]) -> None:
        self.single: list[tuple[Member, PlanEntry]] = []
        self.without_feedback: list[str] = []
        groups: dict[tuple[str, str, str, int, torch.dtype], list[tuple[Member, PlanEntry]]] = {}
        for member, entry, spec in members:
            if not entry.batched and entry.feedback == "none":
                self.without_feedback.append(member.name)
            if entry.batched or is_fused(entry, spec.numel):
                key = repr(entry.compressor), entry.strategy, entry.feedback, entry.partitions, spec.dtype
                groups.setdefault(key, []).append((member, entry))
            else:
                self.single.append((member, entry))
        self.groups = [
            FusionLayout([member for member, _ in group], group[0][1], key[-1]) for key, group in groups.items()
        ]
