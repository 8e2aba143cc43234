"""Codec of sparse-reduce: splits a payload's (position, value) pairs by owner, and adds up what each owner has got.

Each part, and each sum, is a list of one owner's pairs. Body of a list: number of pairs as uint32, values as float32,
then the rows of the owner's positions in few bits or, if that is shorter, as a bitmap; see
`gradwire.kernels.reference.owners` for rows and `gradwire.kernels.reference.positions` for their encoding.
"""

# Shapes: N = elements of the chunk, W = ranks, K = pairs of a list, R = rows.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from gradwire.compressors.base.array import clear
from gradwire.core import buffers
from gradwire.core.errors import PayloadError
from gradwire.core.spec import as_array
from gradwire.kernels import active as kernels
from gradwire.residuals.transaction import Residuals
from gradwire.sync.chunk import Chunk
from gradwire.sync.codec import EMPTY, UNUSED, PayloadCodec, blame, expect_bytes, floats
from gradwire.sync.fusion import FusionGroup
from gradwire.sync.fusion_codec import FusionCodec, join
from gradwire.sync.job import TensorJob
from gradwire.sync.runtime import Runtime
from gradwire.wire.fields import Reader
from gradwire.wire.payload import Payload

COUNT_BYTES = 4


class PairList(NamedTuple):
    """Pairs of one owner, or of all owners one after another.

    Attributes:
        rows: Row of each, uint32[K].
        values: float32[K].
    """

    rows: np.ndarray
    values: np.ndarray


def num_rows(count: int, world_size: int) -> int:
    """Number of rows of a chunk; the last one may be incomplete."""
    return -(-count // world_size)


def max_list_bytes(count: int, world_size: int) -> int:
    """Most bytes of one owner's list of a chunk of `count` elements."""
    rows = num_rows(count, world_size)
    return list_bytes(rows, rows)


def list_bytes(rows: int, num_pairs: int) -> int:
    """Bytes of a list of one owner's pairs."""
    return COUNT_BYTES + 4 * num_pairs + kernels.positions_bytes(rows, num_pairs)


def pack(pairs: PairList, rows: int) -> np.ndarray:
    """Return the body of one owner's list."""
    count = pairs.rows.size
    body = buffers.empty(list_bytes(rows, count))
    body[:COUNT_BYTES].view("<u4")[0] = count
    values_end = COUNT_BYTES + 4 * count
    body[COUNT_BYTES:values_end].view("<f4")[:] = pairs.values
    kernels.pack_positions(pairs.rows, rows, body[values_end:])
    return body


def unpack(body: np.ndarray, rows: int) -> PairList:
    """Undo `pack`.

    Raises:
        PayloadError: The bytes are no list of finite values in ascending rows.
    """
    reader = Reader(body)
    count = int(reader.array(np.uint32, 1)[0])
    if count > rows:
        raise PayloadError(f"Expected at most {rows} pairs, got {count}.")
    values = reader.array(np.float32, count)
    packed = reader.array(np.uint8, kernels.positions_bytes(rows, count))
    reader.end()
    found = np.empty(count, np.uint32)
    if not kernels.unpack_positions(packed, rows, found):
        raise PayloadError(f"Expected {count} ascending rows below {rows}, got others.")
    if kernels.count_nonfinite(values):
        raise PayloadError("Expected finite values, got others.")
    return PairList(found, values)


class SparseCodec(PayloadCodec):
    """Codec that adds lists of pairs by owner, and encodes nothing twice."""

    def __init__(self, job: TensorJob, residuals: Residuals, rank: int, world_size: int, seed: int) -> None:
        super().__init__(job, residuals, rank, world_size, seed)
        self._split: dict[int, tuple[PairList, np.ndarray]] = {}  # by chunk: the pairs by owner, and where each begins

    def start(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        """Encode this rank's gradient, and split its pairs by owner. Returns flags only."""
        payload = super().start(chunk)
        if payload.nonfinite or not payload.used:
            return Payload(EMPTY, payload.nonfinite, payload.used)
        context, stats = self._context(chunk, self.first_stage), self._stats.get(chunk.index, ())
        index, values = self.compressor.pairs(payload, context, chunk.count, stats)
        pairs = PairList(np.empty(index.size, np.uint32), np.empty(index.size, np.float32))
        starts = np.empty(self.world_size + 1, np.int64)
        kernels.split_by_owner(index, values, context.shared_key, self.world_size, *pairs, starts)
        self._split[chunk.index] = pairs, starts
        return Payload(EMPTY)

    def part(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        """Encode the list of the owner `stage` ranks after this one."""
        (own,) = payloads
        if own.nonfinite or not own.used:
            return own
        return Payload(pack(self._own_part(chunk, (self.rank + stage) % self.world_size), self._rows(chunk)))

    def _own_part(self, chunk: Chunk, owner: int) -> PairList:
        (rows, values), starts = self._split[chunk.index]
        return PairList(rows[starts[owner] : starts[owner + 1]], values[starts[owner] : starts[owner + 1]])

    def sum_parts(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        """Add the lists of all ranks, in rank order, and encode the sum exactly. Sums of zero are left out."""
        used = [payload for payload in payloads if payload.used]
        if not used:
            return UNUSED
        if any(payload.nonfinite for payload in used):
            return Payload(EMPTY, nonfinite=True)
        parts = [
            self._own_part(chunk, self.rank) if each.sender is None else self._unpack(chunk, each, self.rank)
            for each in used
        ]
        total = buffers.empty(self._rows(chunk), np.float32)
        kernels.scatter_sum([part.rows for part in parts], [part.values for part in parts], total)
        rows = np.flatnonzero(total).astype(np.uint32)
        values = total[rows]
        if kernels.count_nonfinite(values):
            return Payload(EMPTY, nonfinite=True)
        return Payload(pack(PairList(rows, values), total.size))

    def decode_sums(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> None:
        """Overwrite the gradient with the sums of all owners, given in rank order."""
        out = self.job.values[chunk.slice]
        if any(payload.nonfinite for payload in payloads):
            self.job.nonfinite = True
            out.fill_(torch.nan)
            return
        total = out if out.dtype == torch.float32 else floats(chunk.count)
        clear(total.numpy())
        for owner, payload in enumerate(payloads):
            if payload.used:
                rows, values = self._unpack(chunk, payload, owner)
                kernels.scatter(self._positions(chunk, rows, owner), values, total.numpy())
        if total is not out:
            kernels.cast(total.numpy(), as_array(out))
        self._note_overflow(out)

    def _unpack(self, chunk: Chunk, payload: Payload, owner: int) -> PairList:
        """Return a list of received pairs, each of which is one of the owner's."""
        with blame(self, payload):
            pairs = unpack(payload.body, self._rows(chunk))
            last = self._positions(chunk, pairs.rows[-1:], owner)
            if (last >= chunk.count).any():
                raise PayloadError(f"Expected positions below {chunk.count}, got {last[0]}.")
        return pairs

    def _positions(self, chunk: Chunk, rows: np.ndarray, owner: int) -> np.ndarray:
        index = np.empty(rows.size, np.uint32)
        key = self._context(chunk, self.first_stage).shared_key
        kernels.owned_positions(rows, owner, key, self.world_size, index)
        return index

    def _rows(self, chunk: Chunk) -> int:
        return num_rows(chunk.count, self.world_size)

    def max_payload_bytes(self, chunk: Chunk, stage: int) -> int:
        return max_list_bytes(chunk.count, self.world_size)

    def check(self, chunk: Chunk, payload: Payload) -> None:
        """Raise the error that names the sender if a part for this rank is not what it should be."""
        if payload.nonfinite or not payload.used:
            with blame(self, payload):
                expect_bytes(payload, 0)
        else:
            self._unpack(chunk, payload, self.rank)


class SparseFusionCodec(FusionCodec):
    """The same for a fusion group, member by member."""

    make = SparseCodec

    def part(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        members = self._lists(chunk, payloads, stage)
        return join(codec.part(full, own, stage) for codec, full, own in members)

    def sum_parts(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        members = self._lists(chunk, payloads, stage)
        return join(codec.sum_parts(full, received, stage) for codec, full, received in members)

    def decode_sums(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> None:
        for codec, full, received in self._lists(chunk, payloads, stage):
            codec.decode_sums(full, received, stage)

    def _lists(
        self, chunk: Chunk, payloads: Sequence[Payload], stage: int
    ) -> Iterator[tuple[SparseCodec, Chunk, list[Payload]]]:
        for codec, full, received in self._received(chunk, payloads, stage):
            assert isinstance(codec, SparseCodec)
            yield codec, full, received


def sparse_codec_of(job: TensorJob | FusionGroup, runtime: Runtime) -> SparseCodec | SparseFusionCodec:
    """Return the codec of a job that travels by sparse-reduce."""
    constants = runtime.residuals, runtime.transport.rank, runtime.transport.world_size, runtime.seed
    return SparseCodec(job, *constants) if isinstance(job, TensorJob) else SparseFusionCodec(job, *constants)
