"""The codec of a compressed fusion group: the payloads of its tensors, one by one, in one message.

Body of a message: one uint32 per tensor (the bytes of its payload; bit 31 if the sender's backward pass used it, bit 30
if it was not finite), then the payloads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gradwire.core.errors import PayloadError
from gradwire.residuals.transaction import Residuals
from gradwire.sync.adding_codecs import make_codec
from gradwire.sync.chunk import Chunk
from gradwire.sync.codec import EMPTY, PayloadCodec, blame
from gradwire.sync.fusion import FusionGroup
from gradwire.sync.job import TensorJob
from gradwire.wire.payload import Payload

_USED, _NONFINITE = 1 << 31, 1 << 30
_LENGTH = _NONFINITE - 1


class FusionCodec:
    """Encodes, merges and decodes the members one by one. Operations take it for a `PayloadCodec`."""

    def __init__(self, group: FusionGroup, residuals: Residuals, rank: int, world_size: int, seed: int) -> None:
        self.group = group
        self._codecs = [
            make_codec(
                TensorJob(layout, tensor.view(-1), group.round, group.step, used, group.aux),
                *(residuals, rank, world_size, seed),
            )
            for layout, tensor, used in zip(group.layout.members, group.tensors, group.used, strict=True)
        ]

    def start(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        return _join(codec.start(full) for codec, full in self._members(chunk))

    def merge(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        members = zip(self._members(chunk), self._split(chunk, payloads), strict=True)
        return _join(codec.merge(full, received, stage) for (codec, full), received in members)

    def encode_and_merge(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        members = zip(self._members(chunk), self._split(chunk, payloads), strict=True)
        return _join(codec.encode_and_merge(full, received, stage) for (codec, full), received in members)

    def decode(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> None:
        for (codec, full), received in zip(self._members(chunk), self._split(chunk, payloads), strict=True):
            codec.decode(full, received, stage)

    def decode_sum(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> None:
        for (codec, full), received in zip(self._members(chunk), self._split(chunk, payloads), strict=True):
            codec.decode_sum(full, received, stage)

    def finish(self) -> None:
        for codec in self._codecs:
            codec.finish()
            if codec.job.nonfinite:
                self.group.nonfinite = True

    def check(self, chunk: Chunk, payloads: Sequence[Payload]) -> None:
        """Raise the error that names the sender if a payload is not what it should be."""
        for (codec, full), received in zip(self._members(chunk), self._split(chunk, payloads), strict=True):
            for payload in received:
                codec.check(full, payload)

    # -- one payload for many tensors ------------------------------------------------------------------------

    def _members(self, chunk: Chunk) -> list[tuple[PayloadCodec, Chunk]]:
        codecs = [self._codecs[index] for index in self.group.members_of(chunk)]
        return [(codec, Chunk(0, 0, codec.layout.count)) for codec in codecs]

    def _split(self, chunk: Chunk, payloads: Sequence[Payload]) -> list[list[Payload]]:
        """Return the payloads of all senders for each member of the chunk."""
        members, columns = self._members(chunk), []
        most = [codec.compressor.max_encoded_bytes(codec.layout.spec(full)) for codec, full in members]
        for payload in payloads:
            with blame(self._codecs[0], payload):
                columns.append(_split(payload, most))
        return [list(row) for row in zip(*columns, strict=True)]


def _join(payloads: Iterable[Payload]) -> Payload:
    """Return one payload for many tensors."""
    payloads = list(payloads)
    marks = [each.body.nbytes | _USED * each.used | _NONFINITE * each.nonfinite for each in payloads]
    body = np.concatenate([np.array(marks, "<u4").view(np.uint8), *(each.body for each in payloads)])
    return Payload(body, any(each.nonfinite for each in payloads), any(each.used for each in payloads))


def _split(payload: Payload, max_bytes: Sequence[int]) -> list[Payload]:
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
    if ((marks != 0) & (marks & _USED == 0)).any():
        raise PayloadError("Expected no bytes of unused tensors, got some.")
    found, start = [], table_bytes
    for mark, length in zip(marks.tolist(), lengths.tolist()):
        piece = body[start : start + length] if length else EMPTY
        found.append(Payload(piece, bool(mark & _NONFINITE), bool(mark & _USED), payload.sender))
        start += length
    return found
