"""The codec of a compressed fusion group: the payloads of its tensors, one by one, in one message.

Body of a message: one uint32 per tensor (the bytes of its payload; bit 31 if the sender's backward pass used it, bit 30
if it was not finite), then the payloads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from gradwire.core.errors import PayloadError
from gradwire.residuals.transaction import Residuals
from gradwire.sync.adding_codecs import make_codec
from gradwire.sync.chunk import Chunk
from gradwire.sync.codec import EMPTY, PayloadCodec, blame
from gradwire.sync.fusion import FusionGroup
from gradwire.sync.job import TensorJob
from gradwire.wire.payload import Payload

USED, _NONFINITE = 1 << 31, 1 << 30
_LENGTH = _NONFINITE - 1

Received = tuple[PayloadCodec, Chunk, list[Payload]]
"""A tensor of a group: its codec, all of it as a chunk, and a payload from each sender."""


class FusionCodec:
    """Encodes, merges and decodes the members one by one. Operations take it for a `PayloadCodec`.

    Attributes:
        make: Function that makes the codec of a member.
    """

    make = staticmethod(make_codec)

    def __init__(self, group: FusionGroup, residuals: Residuals, rank: int, world_size: int, seed: int) -> None:
        self.group = group
        self._codecs = [
            self.make(
                TensorJob(layout, tensor.view(-1), group.round, group.step, used, group.aux),
                *(residuals, rank, world_size, seed),
            )
            for layout, tensor, used in zip(group.layout.members, group.tensors, group.used, strict=True)
        ]

    def start(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        return join(codec.start(full) for codec, full in self._members(chunk))

    def merge(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        members = self._received(chunk, payloads, stage - 1)
        return join(codec.merge(full, received, stage) for codec, full, received in members)

    def encode_and_merge(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        members = self._received(chunk, payloads, stage - 1)
        return join(codec.encode_and_merge(full, received, stage) for codec, full, received in members)

    def decode(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> None:
        for codec, full, received in self._received(chunk, payloads, stage):
            codec.decode(full, received, stage)

    def decode_sum(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> None:
        for codec, full, received in self._received(chunk, payloads, stage):
            codec.decode_sum(full, received, stage)

    def finish(self) -> None:
        for codec in self._codecs:
            codec.finish()
            if codec.job.nonfinite:
                self.group.nonfinite = True
            if codec.job.mismatch:
                self.group.mismatch = True

    def check(self, chunk: Chunk, payloads: Sequence[Payload]) -> None:
        """Raise the error that names the sender if a payload is not what it should be."""
        for codec, full, received in self._received(chunk, payloads, 0):
            for payload in received:
                codec.check(full, payload)

    # -- the preliminary round -------------------------------------------------------------------------------

    def stats(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        return join(codec.stats(full) for codec, full in self._members(chunk))

    def stats_of_gradient(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        """Return the statistics of tensors of which this rank only adds those that it owns."""
        return join(
            codec.stats_of_gradient(full) if self._owns(codec) else codec.stats(full)
            for codec, full in self._members(chunk)
        )

    def _owns(self, codec: PayloadCodec) -> bool:
        return codec.layout.rotation % codec.world_size == codec.rank

    def reduce_stats(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> None:
        for codec, full, received in self._received_stats(chunk, payloads):
            codec.reduce_stats(full, received)

    def merge_stats(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> Payload:
        members = self._received_stats(chunk, payloads)
        return join(codec.merge_stats(full, received) for codec, full, received in members)

    def take_reduced_stats(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> None:
        for codec, full, received in self._received_stats(chunk, payloads):
            codec.take_reduced_stats(full, received)

    # -- one payload for many tensors ------------------------------------------------------------------------

    def _members(self, chunk: Chunk) -> list[tuple[PayloadCodec, Chunk]]:
        codecs = [self._codecs[index] for index in self.group.members_of(chunk)]
        return [(codec, Chunk(0, 0, codec.layout.count)) for codec in codecs]

    def _received(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Iterator[Received]:
        """Yield the members of the chunk, each with the payloads of all senders, which have left a stage."""
        members = self._members(chunk)
        return self._columns(members, payloads, [codec.max_payload_bytes(full, stage) for codec, full in members])

    def _received_stats(self, chunk: Chunk, payloads: Sequence[Payload]) -> Iterator[Received]:
        """Yield the members of the chunk, each with the statistics of all senders."""
        members = self._members(chunk)
        return self._columns(members, payloads, [codec.stats_bytes(full) for codec, full in members])

    def _columns(
        self, members: Sequence[tuple[PayloadCodec, Chunk]], payloads: Sequence[Payload], max_bytes: Sequence[int]
    ) -> Iterator[Received]:
        """Yield members, each with the payloads of all senders. Payloads have at most `max_bytes`."""
        rows = []
        for payload in payloads:
            with blame(self._codecs[0], payload):
                rows.append(split(payload, max_bytes))
        for (codec, full), column in zip(members, zip(*rows, strict=True), strict=True):
            yield codec, full, list(column)


def join(payloads: Iterable[Payload]) -> Payload:
    """Return one payload for many tensors."""
    payloads = list(payloads)
    marks = [each.body.nbytes | USED * each.used | _NONFINITE * each.nonfinite for each in payloads]
    body = np.concatenate([np.array(marks, "<u4").view(np.uint8), *(each.body for each in payloads)])
    return Payload(body, any(each.nonfinite for each in payloads), any(each.used for each in payloads))


def split(payload: Payload, max_bytes: Sequence[int]) -> list[Payload]:
    """Return the payloads in a payload.

    Raises:
        PayloadError: Lengths that do not fit the body or the tensors.
    """
    table_bytes, body = 4 * len(max_bytes), payload.body
    if body.nbytes < table_bytes:
        raise PayloadError(f"Expected lengths of {len(max_bytes)} payloads, got {body.nbytes} bytes.")
    marks = body[:table_bytes].view("<u4").astype(np.int64)
    lengths = marks & _LENGTH
    if lengths.sum() != body.nbytes - table_bytes or (lengths > max_bytes).any():
        raise PayloadError(
            f"Expected payloads of {body.nbytes - table_bytes} bytes together and of at most {max(max_bytes)} each, "
            f"got lengths of {lengths.sum()} together and of at most {lengths.max()}."
        )
    if ((marks != 0) & (marks & USED == 0)).any():
        raise PayloadError("Expected no bytes of unused tensors, got some.")
    found, start = [], table_bytes
    for mark, length in zip(marks.tolist(), lengths.tolist()):
        piece = body[start : start + length] if length else EMPTY
        found.append(Payload(piece, bool(mark & _NONFINITE), bool(mark & USED), payload.sender))
        start += length
    return found
