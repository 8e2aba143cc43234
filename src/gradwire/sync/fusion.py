"""Bundles: small tensors of one submission that are encoded in one task and travel in one message.

HiPress's batch compression and bulk communication (SOSP 2021, sections 3.2 and 3.4): what a task, a frame and a wake-up
cost is paid once for many tensors. Each tensor keeps its own payload, statistics, random streams and residuals, so that
a bundle gives the same bits as its tensors would one by one, whole.

A part of a bundle is a group of whole tensors; where each part has an owner, each tensor has one, the same in every
bundle. So a small tensor has one scale, where the ranges of a large one have one each.

Body of a message: a uint32 a tensor (its payload's bytes; bit 31 where the sender's backward used it, bit 30 where it
was not finite), then the payloads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import numpy as np
import torch

from gradwire.compressors.base import SummableCompressor
from gradwire.core.errors import PayloadError
from gradwire.residuals import policies
from gradwire.residuals.transaction import Residuals
from gradwire.sync.codec import EMPTY, LossyCodec, blame, make_codec
from gradwire.sync.job import Chunk, EncodedChunk, TensorJob
from gradwire.sync.plan_entry import PlanEntry
from gradwire.wire.frame import FrameFlags, FrameKind

BUNDLE_FLAG = 1 << 30  # set in the tensor id of a bundle; the rest is the id of its first tensor
MAX_ELEMENTS = 1 << 17  # of a tensor in a bundle: half a megabyte, whose codec takes longer than a frame does
STRATEGIES = ("allgather", "scatter_reduce")
_USED, _NONFINITE = 1 << 31, 1 << 30
_LENGTH = _NONFINITE - 1


def travels_in_bundles(entry: PlanEntry, numel: int) -> bool:
    """Whether such a tensor joins others of its submission; it travels whole even where there are none."""
    codec = entry.compressor
    # Dense ones travel in batches, unless they have a velocity, which belongs to a parameter's name.
    is_dense = codec.exact and not policies.get(entry.feedback).has_velocity
    plain = not (is_dense or codec.needs_stats or isinstance(codec, SummableCompressor) or codec.requires_full_tensor)
    alone = entry.batched or entry.partitions > 1 or numel > MAX_ELEMENTS
    return plain and not alone and entry.strategy in STRATEGIES


def bound(max_bytes: Iterable[int]) -> int:
    """Most bytes of a message of tensors with payloads of at most `max_bytes`."""
    return sum(4 + each for each in max_bytes)


class FusionGroup:
    """Several items that travel as one; see `TensorJob`, whose place it takes.

    Args:
        members: of one compressor, strategy, feedback and element type; the same on all ranks.
        round: number of the submission.
    """

    offset = 0

    def __init__(self, members: Sequence[TensorJob], round: int) -> None:
        first = members[0]
        self.members = members
        self.round = round
        self.name = first.name if len(members) == 1 else f"{first.name} and {len(members) - 1} more"
        self.tensor = first.tensor | BUNDLE_FLAG
        self.entry = first.entry
        self.dtype = first.values.dtype
        self._groups: list[list[int]] = []

    @property
    def num_elements(self) -> int:
        return sum(member.values.numel() for member in self.members)

    @property
    def nbytes(self) -> int:
        return sum(member.values.nbytes for member in self.members)

    @property
    def nonfinite(self) -> bool:
        return any(member.nonfinite for member in self.members)

    def parts(self, num_parts: int) -> list[Chunk]:
        """`num_parts` groups of whole tensors; some may be empty.

        A tensor is in the same owner's group whatever else is in the bundle: residuals must not depend on buckets.
        """
        self._groups = [[] for _ in range(num_parts)]
        for index, member in enumerate(self.members):
            self._groups[(member.place - self.tensor) % num_parts].append(index)
        counts = [sum(self.members[index].values.numel() for index in group) for group in self._groups]
        return [Chunk(index, 0, count) for index, count in enumerate(counts)]

    def group(self, part: Chunk) -> list[int]:
        """Which members a part holds."""
        return self._groups[part.index]


class FusionCodec:
    """Encodes, merges and decodes the members one after another; see `LossyCodec`, whose place it takes."""

    first = 0

    def __init__(self, bundle: FusionGroup, residuals: Residuals, rank: int, world_size: int, seed: int) -> None:
        self.bundle = bundle
        self.rank = rank
        self._codecs = [make_codec(member, residuals, rank, world_size, seed) for member in bundle.members]
        self._wholes = [Chunk(0, 0, member.values.numel()) for member in bundle.members]

    def kind(self, stage: int) -> FrameKind:
        return FrameKind.PAYLOAD

    def encodes_own(self, stage: int) -> bool:
        return self._codecs[0].encodes_own(stage)

    def start(self, part: Chunk) -> EncodedChunk:
        """Encode this rank's gradients of a part."""
        return self._join(codec.start(whole) for codec, whole in self._of(part))

    def merge(self, part: Chunk, messages: Sequence[EncodedChunk], stage: int) -> EncodedChunk:
        """Add what arrived to this rank's gradients, and encode the totals."""
        arrived = self._split(part, messages)
        return self._join(
            codec.merge(whole, theirs, stage) for (codec, whole), theirs in zip(self._of(part), arrived, strict=True)
        )

    def decode(self, part: Chunk, message: EncodedChunk, stage: int) -> None:
        """Write the means of a part over the gradients."""
        for (codec, whole), (mean,) in zip(self._of(part), self._split(part, [message]), strict=True):
            codec.decode(whole, mean, stage)

    def decode_sum(self, part: Chunk, messages: Sequence[EncodedChunk]) -> None:
        """Write the sums of all ranks' payloads of a part over the gradients."""
        for (codec, whole), theirs in zip(self._of(part), self._split(part, messages), strict=True):
            codec.decode_sum(whole, theirs)

    def arrived(self) -> None:
        """Tell the members' codecs that their means are there."""
        for codec in self._codecs:
            codec.arrived()

    # -- one message of many ---------------------------------------------------------------------------------

    def _of(self, part: Chunk) -> list[tuple[LossyCodec, Chunk]]:
        return [(self._codecs[index], self._wholes[index]) for index in self.bundle.group(part)]

    def _join(self, messages: Iterable[EncodedChunk]) -> EncodedChunk:
        messages = list(messages)
        marks = [message.body.nbytes | _USED * message.used | _NONFINITE * message.nonfinite for message in messages]
        body = np.concatenate([np.array(marks, "<u4").view(np.uint8), *(message.body for message in messages)])
        flags = reduce(FrameFlags.__or__, (message.flags for message in messages), FrameFlags.PRESENT)
        return EncodedChunk(FrameKind.PAYLOAD, flags, body, self.rank)

    def _split(self, part: Chunk, messages: Sequence[EncodedChunk]) -> list[list[EncodedChunk]]:
        """By member of the part, the message of each sender."""
        columns = []
        for message in messages:
            with blame(self._codecs[0], message):
                columns.append(_split(message, [self._limit(index) for index in self.bundle.group(part)]))
        return [list(row) for row in zip(*columns, strict=True)]

    def _limit(self, index: int) -> int:
        codec = self._codecs[index]
        return codec.compressor.max_encoded_bytes(codec.item.spec(self._wholes[index]))


def _split(message: EncodedChunk, limits: Sequence[int]) -> list[EncodedChunk]:
    """The messages in a message.

    Raises:
        PayloadError: lengths that do not fit the body, or the tensors.
    """
    table = 4 * len(limits)
    if message.body.nbytes < table:
        raise PayloadError(f"Expected lengths of {len(limits)} payloads, got {message.body.nbytes} bytes.")
    marks = message.body[:table].view("<u4").astype(np.int64)
    lengths = marks & _LENGTH
    if lengths.sum() != message.body.nbytes - table or (lengths > limits).any():
        raise PayloadError(
            f"Expected payloads of {message.body.nbytes - table} bytes together and of at most {max(limits)} each, "
            f"got lengths of {lengths.sum()} together and of at most {lengths.max()}."
        )
    found, start = [], table
    for mark, length in zip(marks.tolist(), lengths.tolist()):
        flags = FrameFlags.PRESENT
        flags |= FrameFlags.USED if mark & _USED else flags
        flags |= FrameFlags.NONFINITE if mark & _NONFINITE else flags
        body = message.body[start : start + length] if length else EMPTY
        found.append(EncodedChunk(message.kind, flags, body, message.sender))
        start += length
    return found


def bundle_items(items: Sequence[TensorJob], rounds: Iterator[int]) -> list[FusionGroup]:
    """Items that may travel in bundles, in bundles as large as there are."""
    groups: dict[tuple[str, str, str, torch.dtype], list[TensorJob]] = {}
    for item in items:
        entry = item.entry
        groups.setdefault((repr(entry.compressor), entry.strategy, entry.feedback, item.values.dtype), []).append(item)
    return [FusionGroup(group, next(rounds)) for group in groups.values()]
