"""Batch compression: all tensors of a fusion group are encoded, merged or decoded in one compiled call.

What does not change from step to step (numbers of elements, limits, static values, places of residuals) is prepared
once and kept. A step fills in addresses, and keys of random numbers if the compressor draws any.

Source: HiPress (SOSP 2021), section 3.2, batch compression. Differences: on the CPU, and also for merging and decoding.
"""
# Shapes: M = tensors of a chunk, W = ranks

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gradwire.compressors.base import Compiled
from gradwire.compressors.base.array import scratch
from gradwire.core import host
from gradwire.core.context import Context, key_words
from gradwire.core.errors import SyncError
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.kernels.cpu import groups
from gradwire.kernels.cpu.elements import as_input
from gradwire.residuals import MomentumCorrection
from gradwire.residuals.slices import ResidualKey, Role
from gradwire.residuals.transaction import Residuals, ResidualSlots
from gradwire.sync.adding_codecs import make_codec
from gradwire.sync.chunk import Chunk
from gradwire.sync.codec import PayloadCodec
from gradwire.sync.fusion import FusionGroup
from gradwire.sync.fusion_codec import FusionCodec
from gradwire.sync.job import TensorJob
from gradwire.sync.low_rank_codec import LowRankCodec
from gradwire.sync.runtime import Runtime
from gradwire.wire.payload import Payload

_FLOAT32 = np.empty(0, np.float32)


@dataclass
class ChunkLayout:
    """What stays the same of a chunk's tensors.

    Attributes:
        members: Their indices in the group, int64[M].
        table: See `groups.encode_group`, int64[M, 3].
        static: Static values, float64[M, S]; None if they change from step to step.
        scratch_bytes: Scratch memory that the largest tensor needs.
        message_bytes: Most bytes of a message.
        slots: Residuals, by role.
    """

    members: np.ndarray
    table: np.ndarray
    static: np.ndarray | None
    scratch_bytes: int
    message_bytes: int
    slots: dict[Role, ResidualSlots] = field(default_factory=dict)


class BatchCodec:
    """Codec of a fusion group whose compressor has compiled functions. Operations take it for a `PayloadCodec`.

    Args:
        compiled: Result of `compiled_of`.

    Compiled tensors with momentum correction travel by all-gather, which never merges: `start` alone needs velocities.
    """

    def __init__(
        self, group: FusionGroup, residuals: Residuals, rank: int, world_size: int, seed: int, compiled: Compiled
    ) -> None:
        self.group = group
        self._compiled = compiled
        self._residuals = residuals
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        policy = group.layout.policy
        self._momentum = policy.momentum if isinstance(policy, MomentumCorrection) else None
        self._feedback = policy.keeps_residuals(group.layout.entry.compressor)
        self._places = np.array([tensor.data_ptr() for tensor in group.tensors], np.uint64)
        self._own_places = self._places * np.array(group.used, np.uint64)
        self._like = as_input(as_array(host.empty(0, group.layout.dtype)))
        self._decode_sum = np.uint64(groups.decoder(compiled.decode_sum))

    @staticmethod
    def compiled_of(group: FusionGroup, residuals: Residuals) -> Compiled | None:
        """Return what compiles the group's compressor; None if its tensors must be encoded one by one."""
        entry, policy = group.layout.entry, group.layout.policy
        may_be_left = policy.has_velocity and not policy.keeps_residuals(entry.compressor)  # by an earlier plan
        if may_be_left and any(map(residuals.holds_after_pruning, group.layout.names)):
            return None
        return entry.compressor.compiled() if policy.is_compiled(entry.compressor) else None

    def start(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        layout = self._layout(chunk)
        own, body = self._own_places[layout.members], np.empty(layout.message_bytes, np.uint8)
        grads, like, scale = self._contribution(layout, own)
        size = groups.encode_group(
            self._encoder(like), like,
            self._residual, layout.table, grads, scale,
            *self._stage(layout, "local", own != 0), self._keys(layout, 0), self._static(layout),
            scratch(layout.scratch_bytes), body,
        )  # fmt: skip
        return _payload(layout, body[:size])

    def _contribution(self, layout: ChunkLayout, own: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
        """Return the addresses of gradients or velocities, an empty array of their type, and their factor."""
        scale = np.float32(1 / self._world_size)
        if self._momentum is None:
            return own, self._like, scale
        before, after = layout.slots["velocity"].stage((own != 0).tolist())
        groups.advance_group(self._like, layout.table, own, scale, before, np.float32(self._momentum), after)
        return after, _FLOAT32, np.float32(1)

    def merge(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        return self._merge(chunk, payloads, self._own_places[self._layout(chunk).members], stage)

    def encode_and_merge(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        own = np.zeros(len(self._layout(chunk).members), np.uint64)
        return self._merge(chunk, [self.start(chunk), *payloads], own, stage)

    def _merge(self, chunk: Chunk, payloads: Sequence[Payload], own: np.ndarray, stage: int) -> Payload:
        layout = self._layout(chunk)
        used = (own != 0) | self._used(chunk, payloads)
        body = np.empty(layout.message_bytes, np.uint8)
        size = groups.merge_group(
            self._encoder(_FLOAT32), self._decode_sum, self._like,
            self._residual, layout.table, own, np.float32(1 / self._world_size),
            *self._stage(layout, "aggregate", used), self._keys(layout, stage), self._static(layout),
            scratch(layout.scratch_bytes), self._total(layout), *_addresses(payloads), body,
        )  # fmt: skip
        if size < 0:
            raise self._damaged(chunk, payloads)
        return _payload(layout, body[:size])

    def decode(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> None:
        self.decode_sum(chunk, payloads)

    def decode_sum(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> None:
        layout = self._layout(chunk)
        found = groups.decode_group(
            self._decode_sum, self._like, layout.table, self._places[layout.members], self._keys(layout, 0),
            self._static(layout),
            scratch(layout.scratch_bytes), _FLOAT32 if self._like.dtype == np.float32 else self._total(layout),
            *_addresses(payloads),
        )  # fmt: skip
        if found < 0:
            raise self._damaged(chunk, payloads)
        if found or self._overflows(layout, computed=len(payloads) > 1):
            self.group.nonfinite = True

    def _overflows(self, layout: ChunkLayout, computed: bool) -> bool:
        """Whether a mean is not finite, although no payload is marked; see `PayloadCodec._note_overflow`."""
        if not computed and self.group.layout.dtype.itemsize >= 4:
            return False
        means = (self.group.tensors[index] for index in layout.members)
        return any(kernels.count_nonfinite(as_array(mean)) for mean in means)

    def finish(self) -> None:
        """There are no states."""

    # -- arguments of the compiled calls ---------------------------------------------------------------------

    def _layout(self, chunk: Chunk) -> ChunkLayout:
        prepared: dict[int, ChunkLayout] = self.group.layout.prepared
        if chunk.index not in prepared:
            prepared[chunk.index] = self._prepare(chunk)
        return prepared[chunk.index]

    def _prepare(self, chunk: Chunk) -> ChunkLayout:
        indices, compressor = self.group.members_of(chunk), self.group.layout.entry.compressor
        members = [self.group.layout.members[index] for index in indices]
        most = [compressor.max_encoded_bytes(TensorSpec((member.count,), member.dtype)) for member in members]
        rows = [(member.count, member.offset, size) for member, size in zip(members, most, strict=True)]
        needed = [self._compiled.scratch_bytes(member.count, self._world_size) for member in members]
        table = np.array(rows, np.int64).reshape(-1, 3)
        layout = ChunkLayout(np.array(indices), table, None, max(needed), sum(most) + groups.MARK_BYTES * len(members))
        if not self._compiled.uses_step:
            layout.static = self._static(layout)
        roles: list[Role] = ["local", "aggregate"] if self._feedback else []
        for role in roles if self._momentum is None else [*roles, "velocity"]:
            layout.slots[role] = self._residuals.slots(
                [ResidualKey(member.name, member.range, role) for member in members]
            )
        return layout

    def _encoder(self, like: np.ndarray) -> np.uint64:
        return np.uint64(groups.encoder(self._compiled.encode, like.dtype, self._feedback))

    @property
    def _residual(self) -> np.ndarray | None:
        return _FLOAT32 if self._feedback else None

    def _stage(self, layout: ChunkLayout, role: Role, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the addresses of the residuals and of the next ones, for the tensors that are encoded."""
        if self._feedback:
            return layout.slots[role].stage(used.tolist())
        nothing = np.zeros(len(layout.members), np.uint64)
        return nothing, nothing

    def _static(self, layout: ChunkLayout) -> np.ndarray:
        if layout.static is not None:
            return layout.static
        counts, step = layout.table[:, 0].tolist(), self.group.step
        return np.stack([self._compiled.static(count, step) for count in counts])

    def _keys(self, layout: ChunkLayout, stage: int) -> np.ndarray:
        if not self._compiled.uses_keys:
            return np.zeros((len(layout.members), 4), np.uint32)
        names = [self.group.layout.names[index] for index in layout.members]
        contexts = [
            Context(name, self.group.step, self._rank, self._world_size, self._seed, stage=stage) for name in names
        ]
        return np.stack([key_words(context) for context in contexts])

    def _total(self, layout: ChunkLayout) -> np.ndarray:
        return np.empty(int(layout.table[:, 0].max()), np.float32)

    def _used(self, chunk: Chunk, payloads: Sequence[Payload]) -> np.ndarray:
        """Return which tensors any sender has used, bool[M]."""
        table_bytes = groups.MARK_BYTES * len(self.group.members_of(chunk))
        if any(payload.body.nbytes < table_bytes for payload in payloads):
            raise self._damaged(chunk, payloads)
        marks = [payload.body[:table_bytes].view("<u4") for payload in payloads]
        used: np.ndarray = (np.bitwise_or.reduce(marks) & groups.USED) != 0
        return used

    def _damaged(self, chunk: Chunk, payloads: Sequence[Payload]) -> SyncError:
        """Return the error that names the sender of a damaged payload, which decoding one by one finds."""
        try:
            FusionCodec(self.group, self._residuals, self._rank, self._world_size, self._seed).check(chunk, payloads)
        except SyncError as error:
            return error
        return SyncError("The payload of a fusion group is damaged, although all payloads in it are valid.")


def codec_of(job: TensorJob | FusionGroup, runtime: Runtime) -> PayloadCodec | FusionCodec | BatchCodec:
    """Return the codec of a job that travels between ranks."""
    constants = runtime.residuals, runtime.transport.rank, runtime.transport.world_size, runtime.seed
    if isinstance(job, TensorJob):
        return make_codec(job, *constants)
    compiled = BatchCodec.compiled_of(job, runtime.residuals)
    if compiled is not None:
        return BatchCodec(job, *constants, compiled)
    return LowRankCodec(job, *constants) if LowRankCodec.suits(job) else FusionCodec(job, *constants)


def _payload(layout: ChunkLayout, body: np.ndarray) -> Payload:
    marks = np.bitwise_or.reduce(body[: groups.MARK_BYTES * len(layout.members)].view("<u4"))
    return Payload(body, bool(marks & groups.NONFINITE), bool(marks & groups.USED))


def _addresses(payloads: Sequence[Payload]) -> tuple[np.ndarray, np.ndarray]:
    """Return the addresses of payloads, uint64[W], and their bytes, int64[W]."""
    places = [payload.body.__array_interface__["data"][0] for payload in payloads]
    return np.array(places, np.uint64), np.array([payload.body.nbytes for payload in payloads], np.int64)
