"""The codec of a fusion group that PowerSGD compresses: all matrices of a chunk in one compiled call.

The same bytes, residuals and states as `FusionCodec`, which takes over wherever something is out of the ordinary: a
rank that has not used a tensor, values that are not finite or close to the largest float, a message of another form.

Source: HiPress (SOSP 2021), section 3.2, batch compression; Vogels et al. 2019. Differences: matrices of different
shapes share a call.
"""
# Shapes: M = matrices of a chunk, r = rank, A and B = shorter and longer side of a matrix

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.compressors.powersgd import EXACT_TO, PowerSGD, matrix
from gradwire.core.spec import TensorSpec
from gradwire.kernels import active as kernels
from gradwire.kernels.cpu import low_rank_groups as groups
from gradwire.residuals.slices import ResidualKey
from gradwire.residuals.transaction import Residuals, ResidualSlots
from gradwire.sync.adding_codecs import AccumulatorCodec
from gradwire.sync.chunk import Chunk
from gradwire.sync.codec import PayloadCodec
from gradwire.sync.fusion import FusionGroup
from gradwire.sync.fusion_codec import USED, FusionCodec, join
from gradwire.sync.job import TensorLayout
from gradwire.wire.payload import Payload


@dataclass
class LowRankLayout:
    """What stays the same of a chunk's matrices.

    Attributes:
        indices: Their indices in the group, int64[M].
        members: Their layouts.
        table: See `low_rank_groups`.
        short_ends: Ends of the shorter factors, int64[M].
        long_ends: Ends of the longer factors, int64[M].
        lengths: Length of the rows of Q with which a matrix is multiplied, float32[M].
        slots: Their residuals.
    """

    indices: np.ndarray
    members: list[TensorLayout]
    table: np.ndarray
    short_ends: np.ndarray
    long_ends: np.ndarray
    lengths: np.ndarray
    slots: ResidualSlots


class LowRankCodec(FusionCodec):
    """Codec of a group of matrices. Operations take it for a `PayloadCodec`."""

    def __init__(self, group: FusionGroup, residuals: Residuals, rank: int, world_size: int, seed: int) -> None:
        super().__init__(group, residuals, rank, world_size, seed)
        assert isinstance(group.layout.entry.compressor, PowerSGD)
        self._compressor = group.layout.entry.compressor
        self._residuals = residuals
        self._world_size = world_size
        self._places = np.array([tensor.data_ptr() for tensor in group.tensors], np.uint64)
        # By index of the chunk:
        self._compensated: dict[int, np.ndarray] = {}  # addresses, once the preliminary round has begun
        self._bases: dict[int, np.ndarray] = {}  # of all its matrices, once it has ended

    @staticmethod
    def suits(group: FusionGroup) -> bool:
        """Whether all tensors of a group are matrices that this rank has used."""
        layout, compressor = group.layout, group.layout.entry.compressor
        return (
            isinstance(compressor, PowerSGD)
            and layout.entry.feedback == "error"
            and layout.dtype == torch.float32
            and all(group.used)
            and all(compressor.is_cut(_spec(member)) for member in layout.members)
        )

    # -- the preliminary round -------------------------------------------------------------------------------

    def stats(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        layout = self._layout(chunk)
        before, compensated = layout.slots.stage([True] * len(layout.members))
        body, values = self._message(layout.short_ends)
        groups.project(
            layout.table, self._compressor.rank, self._places[layout.indices], np.float32(1 / self._world_size),
            before, compensated, self._starts(layout), values,
        )  # fmt: skip
        self._compensated[chunk.index] = compensated
        return Payload(body)

    def _starts(self, layout: LowRankLayout) -> np.ndarray:
        """Normalized Qᵀ of the step before, or drawn ones, of all matrices."""
        rank, states = self._compressor.rank, np.zeros(_last(layout.long_ends), np.float32)
        begins = [0, *layout.long_ends[:-1].tolist()]
        for member, begin, end in zip(layout.members, begins, layout.long_ends.tolist(), strict=True):
            state = self._residuals.states.get(member.name, member.range, self.group.step)
            if state is not None and state.dtype == np.float32 and state.size == end - begin:
                states[begin:end] = state
        units, is_drawn = np.empty_like(states), np.empty(len(layout.members), np.bool_)
        groups.normalize(layout.table, rank, states, layout.lengths, units, is_drawn)
        for index in np.flatnonzero(is_drawn).tolist():
            codec = self._codecs[layout.indices[index]]
            full = Chunk(0, 0, codec.layout.count)
            begin, end = begins[index], int(layout.long_ends[index])
            side = (end - begin) // rank
            units[begin:end] = self._compressor.start(codec.context(full), side, 1 / side**0.5).reshape(-1)
        return units

    def reduce_stats(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> None:
        if self._merge_stats(chunk, payloads) is None:
            super().reduce_stats(chunk, payloads, stage)

    def merge_stats(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> Payload:
        return self._merge_stats(chunk, payloads) or super().merge_stats(chunk, payloads, stage)

    def _merge_stats(self, chunk: Chunk, payloads: Sequence[Payload]) -> Payload | None:
        layout = self._layout(chunk)
        rows = self._factors(layout.short_ends, payloads)
        if rows is None:
            return None
        total = rows[0].copy()
        for row in rows[1:]:
            total += row
        body, self._bases[chunk.index] = self._message(layout.short_ends)
        groups.orthonormalize(layout.table, self._compressor.rank, total, self._bases[chunk.index])
        return Payload(body)

    def take_reduced_stats(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> None:
        rows = self._factors(self._layout(chunk).short_ends, payloads)
        if rows is None:
            super().take_reduced_stats(chunk, payloads, stage)
        else:
            (self._bases[chunk.index],) = rows

    # -- encode, add and decode ------------------------------------------------------------------------------

    def start(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        layout, bases = self._layout(chunk), self._bases.get(chunk.index)
        if bases is not None:
            body, values = self._message(layout.long_ends)
            places, rank = self._compensated[chunk.index], self._compressor.rank
            if groups.encode(layout.table, rank, places, bases, values, EXACT_TO):
                return Payload(body)
        return super().start(chunk)

    def encode_and_merge(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        layout, own = self._layout(chunk), self.start(chunk)
        rows = self._finite(layout, [own, *payloads]) if stage == 1 else None
        if rows is not None:
            body, total = self._message(layout.long_ends)
            _add(rows, total)
            return Payload(body)
        members = self._received(chunk, [own, *payloads], stage - 1)
        return join(
            _accumulating(codec).add_up(full, first, others, stage) for codec, full, (first, *others) in members
        )

    def _members(self, chunk: Chunk) -> list[tuple[PayloadCodec, Chunk]]:
        """The matrices one by one, with the bases that were found for all of them."""
        members, bases, ends = super()._members(chunk), self._bases.get(chunk.index), self._layout(chunk).short_ends
        if bases is not None:
            for (codec, full), basis in zip(members, np.split(bases, ends[:-1]), strict=True):
                codec.set_stats(full, [basis])
        return members

    def decode(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> None:
        if not self._decode(chunk, payloads):
            super().decode(chunk, payloads, stage)

    def decode_sum(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> None:
        if not self._decode(chunk, payloads):
            super().decode_sum(chunk, payloads, stage)

    def _decode(self, chunk: Chunk, payloads: Sequence[Payload]) -> bool:
        """Write means and stage the summed factors; False if nothing was done."""
        layout, bases = self._layout(chunk), self._bases.get(chunk.index)
        rows = None if bases is None else self._finite(layout, payloads)
        if rows is None:
            return False
        total = np.empty(_last(layout.long_ends), np.float32)
        _add(rows, total)
        places, most = self._places[layout.indices], float(np.finfo(np.float32).max) / 2
        if not groups.decode(layout.table, self._compressor.rank, bases, total, places, most):
            return False
        begins = [0, *layout.long_ends[:-1].tolist()]
        for member, begin, end in zip(layout.members, begins, layout.long_ends.tolist(), strict=True):
            self._residuals.states.stage(member.name, member.range, total[begin:end], self.group.step)
        return True

    # -- messages --------------------------------------------------------------------------------------------

    def _message(self, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A message of factors that all are used and finite, uint8, and its values, float32, to be written."""
        body = np.empty(4 * (len(ends) + _last(ends)), np.uint8)
        body[: 4 * len(ends)].view("<u4")[:] = _marks(ends)
        return body, body[4 * len(ends) :].view(np.float32)

    def _factors(self, ends: np.ndarray, payloads: Sequence[Payload]) -> list[np.ndarray] | None:
        """The values of messages in which all factors are used and finite; None if one is not such a message."""
        marks, nbytes = _marks(ends), 4 * (len(ends) + _last(ends))
        bodies = [payload.body for payload in payloads]
        if not all(
            body.nbytes == nbytes and np.array_equal(body[: marks.nbytes].view("<u4"), marks) for body in bodies
        ):
            return None
        return [body[marks.nbytes :].view(np.float32) for body in bodies] or None

    def _finite(self, layout: LowRankLayout, payloads: Sequence[Payload]) -> list[np.ndarray] | None:
        rows = self._factors(layout.long_ends, payloads)
        return None if rows is None or any(kernels.count_nonfinite(row) for row in rows) else rows

    def _layout(self, chunk: Chunk) -> LowRankLayout:
        prepared: dict[int, LowRankLayout] = self.group.layout.prepared
        if chunk.index not in prepared:
            prepared[chunk.index] = self._prepare(chunk)
        return prepared[chunk.index]

    def _prepare(self, chunk: Chunk) -> LowRankLayout:
        rank, indices = self._compressor.rank, np.array(self.group.members_of(chunk), np.int64)
        members = [self.group.layout.members[index] for index in indices]
        shapes = np.array([matrix(_spec(member)) for member in members])
        short, long = rank * shapes.min(1), rank * shapes.max(1)
        short_ends, long_ends = short.cumsum(), long.cumsum()
        return LowRankLayout(
            indices,
            members,
            np.column_stack([shapes, short_ends - short, long_ends - long]),
            short_ends,
            long_ends,
            np.array([1 / side**0.5 for side in shapes.max(1).tolist()], np.float32),
            self._residuals.slots([ResidualKey(member.name, member.range) for member in members]),
        )


def _spec(member: TensorLayout) -> TensorSpec:
    return member.spec(Chunk(0, 0, member.count))


def _accumulating(codec: object) -> AccumulatorCodec:
    assert isinstance(codec, AccumulatorCodec), "payloads of PowerSGD add up"
    return codec


def _last(ends: np.ndarray) -> int:
    return int(ends[-1]) if len(ends) else 0


def _marks(ends: np.ndarray) -> np.ndarray:
    return (4 * np.diff(ends, prepend=0)).astype("<u4") | np.uint32(USED)


def _add(rows: Sequence[np.ndarray], total: np.ndarray) -> None:
    total.fill(0)
    with np.errstate(over="ignore"):  # a sum beyond float32 is seen by whoever decodes it
        for row in rows:
            total += row
