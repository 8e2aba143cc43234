"""Fusion of small compressed tensors: tensors of one submission share an encode task and a message.

The cost of a task, a frame and a wake-up is paid once for many tensors. Each tensor keeps its own payload, statistics,
random streams and residuals, so a group gives the same bits as its tensors would one by one, unsplit.

A chunk of a group holds full tensors. If chunks have owners, each tensor has one, the same in every group. So a small
tensor has one scale, whereas each range of a large tensor has its own.

Body of a message: one uint32 per tensor (the bytes of its payload; bit 31 if the sender's backward pass used it, bit 30
if it was not finite), then the payloads.

Source: HiPress (SOSP 2021), sections 3.2 and 3.4: batch compression and bulk communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, reduce

import numpy as np
import torch

from gradwire.compressors.base import SummableCompressor
from gradwire.core.errors import PayloadError
from gradwire.residuals import policies
from gradwire.residuals.transaction import Residuals
from gradwire.sync.codec import EMPTY, PayloadCodec, blame, make_codec
from gradwire.sync.job import Chunk, EncodedChunk, TensorJob, group_name
from gradwire.sync.plan_entry import PlanEntry
from gradwire.wire.frame import FrameFlags, FrameKind

FUSION_FLAG = 1 << 30  # set in the tensor id of a group; the other bits are the id of its first tensor
MAX_FUSED_ELEMENTS = 1 << 17  # half a megabyte: above this, encoding a tensor takes longer than sending a frame
FUSION_STRATEGIES = ("allgather", "scatter_reduce")
_USED, _NONFINITE = 1 << 31, 1 << 30
_LENGTH = _NONFINITE - 1


def is_fused(entry: PlanEntry, numel: int) -> bool:
    """Whether a tensor is fused with others of its submission. It is not split even if it is alone."""
    codec = entry.compressor
    # Dense tensors are fused across submissions instead, unless they have a velocity, which belongs to one parameter.
    is_dense = codec.exact and not policies.get(entry.feedback).has_velocity
    plain = not (is_dense or codec.needs_stats or isinstance(codec, SummableCompressor) or codec.requires_full_tensor)
    alone = entry.batched or entry.partitions > 1 or numel > MAX_FUSED_ELEMENTS
    return plain and not alone and entry.strategy in FUSION_STRATEGIES


def max_message_bytes(max_payload_bytes: Iterable[int]) -> int:
    """Return the most bytes of a message, from the most bytes of each payload in it."""
    return sum(4 + each for each in max_payload_bytes)


class FusionGroup:
    """Several jobs that are synchronized as one. It has the interface of `TensorJob`.

    Args:
        members: Jobs with the same compressor, strategy, feedback and element type. The same on all ranks.
        round: Number of the submission.
    """

    offset = 0

    def __init__(self, members: Sequence[TensorJob], round: int) -> None:
        first = members[0]
        self.members = members
        self.round = round
        self.name = group_name([member.name for member in members])
        self.tensor = first.tensor | FUSION_FLAG
        self.entry = first.entry
        self.dtype = first.values.dtype
        self._members_of_chunk: list[list[int]] = []

    @property
    def num_elements(self) -> int:
        return sum(member.values.numel() for member in self.members)

    @property
    def nbytes(self) -> int:
        return sum(member.values.nbytes for member in self.members)

    @property
    def nonfinite(self) -> bool:
        return any(member.nonfinite for member in self.members)

    def chunks(self, num_chunks: int) -> list[Chunk]:
        """Return `num_chunks` chunks of full tensors. Some may be empty.

        A tensor has the same owner in every group, because residuals must not depend on buckets.
        """
        self._members_of_chunk = [[] for _ in range(num_chunks)]
        for index, member in enumerate(self.members):
            self._members_of_chunk[(member.fusion_index - self.tensor) % num_chunks].append(index)
        counts = [sum(self.members[index].values.numel() for index in indices) for indices in self._members_of_chunk]
        return [Chunk(index, 0, count) for index, count in enumerate(counts)]

    def members_of(self, chunk: Chunk) -> list[int]:
        """Return the indices of the members in a chunk."""
        return self._members_of_chunk[chunk.index]


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

    @cached_property
    def _full_chunks(self) -> list[Chunk]:
        return [Chunk(0, 0, member.values.numel()) for member in self.group.members]

    def kind(self, stage: int) -> FrameKind:
        return FrameKind.PAYLOAD

    def encodes_own(self, stage: int) -> bool:
        return self._codecs[0].encodes_own(stage)

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
        return [(self._codecs[index], self._full_chunks[index]) for index in self.group.members_of(chunk)]

    def _join(self, messages: Iterable[EncodedChunk]) -> EncodedChunk:
        messages = list(messages)
        marks = [message.body.nbytes | _USED * message.used | _NONFINITE * message.nonfinite for message in messages]
        body = np.concatenate([np.array(marks, "<u4").view(np.uint8), *(message.body for message in messages)])
        flags = reduce(FrameFlags.__or__, (message.flags for message in messages), FrameFlags.PRESENT)
        return EncodedChunk(FrameKind.PAYLOAD, flags, body, self.rank)

    def _split(self, chunk: Chunk, messages: Sequence[EncodedChunk]) -> list[list[EncodedChunk]]:
        """Return the messages of all senders for each member of the chunk."""
        columns = []
        for message in messages:
            with blame(self._codecs[0], message):
                columns.append(_split(message, [self._max_bytes(index) for index in self.group.members_of(chunk)]))
        return [list(row) for row in zip(*columns, strict=True)]

    def _max_bytes(self, index: int) -> int:
        codec = self._codecs[index]
        return codec.compressor.max_encoded_bytes(codec.job.spec(self._full_chunks[index]))


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


def fuse(jobs: Sequence[TensorJob], rounds: Iterator[int]) -> list[FusionGroup]:
    """Combine jobs for which `is_fused` holds into groups, as large as possible."""
    groups: dict[tuple[str, str, str, torch.dtype], list[TensorJob]] = {}
    for job in jobs:
        entry = job.entry
        groups.setdefault((repr(entry.compressor), entry.strategy, entry.feedback, job.values.dtype), []).append(job)
    return [FusionGroup(group, next(rounds)) for group in groups.values()]
