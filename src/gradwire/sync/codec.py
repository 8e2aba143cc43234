"""How the ranges of one item are encoded, merged and decoded: the compressor, its residuals and its flags together.

Every encode owns a residual where the plan asks for feedback: it compensates, encodes and stages in one call. All
residuals and all payloads are in units of the mean: gradients are scaled by 1/W as they are encoded. So payloads only
add up, nothing is divided afterwards, and a residual means the same under every strategy and world size.

Two algebras: `LossyCodec` decodes, adds in float32 and encodes again, with a residual of role ``aggregate``;
`AccumulatorCodec` is for summable compressors: it adds accumulators and decodes only their sum.
"""

# Shapes: N = elements of the range, W = ranks.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gradwire.compressors.base import Compressor, StatefulCompressor, SummableCompressor
from gradwire.compressors.base.registry import DENSE_NAME, make
from gradwire.core.context import Context
from gradwire.core.errors import PayloadError, SyncError
from gradwire.core.spec import ElementRange, as_array
from gradwire.kernels import active as kernels
from gradwire.residuals import policies
from gradwire.residuals.policies import EncodeInput
from gradwire.residuals.transaction import ResidualKey, Residuals, Role
from gradwire.sync.job import Chunk, EncodedChunk, TensorJob
from gradwire.wire.frame import FrameFlags, FrameKind
from gradwire.wire.payload import Payload

EMPTY = np.empty(0, dtype=np.uint8)
DENSE = make(DENSE_NAME)  # within a node
_REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class LossyCodec:
    """Payloads that are decoded to be added."""

    def __init__(self, item: TensorJob, residuals: Residuals, rank: int, world_size: int, seed: int) -> None:
        self.item = item
        self.compressor: Compressor = item.entry.compressor
        self.rank = rank
        self.world_size = world_size
        self._policy = policies.get(item.entry.feedback)
        self._residuals = residuals
        self._seed = seed
        compressor = self.compressor
        self._state_source = compressor.state_source if isinstance(compressor, StatefulCompressor) else None
        self._stats: dict[int, list[np.ndarray]] = {}  # reduced, by part
        self._sums: dict[int, torch.Tensor | None] = {}  # by part, of this rank's node, where there is one
        self._owns: dict[int, EncodeInput] = {}  # by part, what the policy makes of the own gradient
        self.first = 0  # stage of the first encode
        self.num_encoders = world_size  # how many ranks have something of a part to encode

    def encode_from(self, stage: int, among: int) -> None:
        """Encode from `stage` on, what `among` ranks have of each part."""
        self.first, self.num_encoders = stage, among

    def kind(self, stage: int) -> FrameKind:
        """The kind of frame that leaves a stage."""
        return FrameKind.PAYLOAD

    # -- own gradient ----------------------------------------------------------------------------------------

    def _own(self, part: Chunk) -> EncodeInput | None:
        """What this rank contributes of `part`: its node's sum if there is one. None if it has nothing."""
        if part.index in self._sums:
            total = self._sums[part.index]
            return None if total is None else self._input(part, total, "local", self.first)
        self.item.wait_loaded()
        if not self.item.used:
            return None
        if part.index not in self._owns:
            own = self._input(part, self.item.values[part.slice], "local", self.first, 1 / self.world_size)
            self._owns[part.index] = self._policy.contribution(own)
        return self._owns[part.index]

    def _input(self, part: Chunk, grad: torch.Tensor, role: Role, stage: int, scale: float = 1.0) -> EncodeInput:
        key = ResidualKey(self.item.name, self.item.range(part), role)
        return EncodeInput(self.compressor, grad, self._context(part, stage), self._residuals, key, scale)

    def start(self, part: Chunk) -> EncodedChunk:
        """Encode this rank's gradient of `part`, or its node's sum."""
        own = self._own(part)
        if own is None:  # its residual stays where it is (R10)
            return self._message(FrameKind.PAYLOAD, None)
        stats = self._stats.get(part.index, ())
        if not all(np.isfinite(values).all() for values in stats):
            return self._message(FrameKind.PAYLOAD, Payload(EMPTY, nonfinite=True))
        return self._message(FrameKind.PAYLOAD, self._encode(own, stats))

    def _encode(self, source: EncodeInput, stats: Sequence[np.ndarray] = ()) -> Payload:
        if self.item.aux is not None:
            source = source._replace(ctx=replace(source.ctx, aux=self.item.aux(source.key.range)))
        payload = self._policy.encode(source, stats)
        if self._state_source == "payload":
            self._stage_state(payload, source.ctx, source.key.range)
        return payload

    def _stage_state(self, source: Payload | np.ndarray, context: Context, where: ElementRange) -> None:
        assert isinstance(self.compressor, StatefulCompressor)
        self._residuals.states.stage(context.name, where, self.compressor.next_state(source, context), context.step)

    # -- merging ---------------------------------------------------------------------------------------------

    def encodes_own(self, stage: int) -> bool:
        """Whether a merge of this stage encodes the rank's own gradient, too, before it adds it."""
        return self.compressor.encode_own_before_merge and stage == self.first + 1

    def merge(self, part: Chunk, messages: Sequence[EncodedChunk], stage: int) -> EncodedChunk:
        """Add what arrived to this rank's gradient, or its node's sum, and encode the total, which is an aggregate."""
        own = self._own(part)
        if self.encodes_own(stage):
            messages, own = [self.start(part), *messages], None
        used = [message for message in messages if message.used]
        if not used and own is None:
            return self._message(FrameKind.PAYLOAD, None)
        total = torch.empty(part.count, dtype=torch.float32)
        self._decode_sum(part, used, total, stage - 1)
        if own is not None:
            kernels.compensate(as_array(own.grad), own.scale, total.numpy(), total.numpy())
        return self._message(FrameKind.PAYLOAD, self._encode(self._input(part, total, "aggregate", stage)))

    def decode(self, part: Chunk, message: EncodedChunk, stage: int) -> None:
        """Write the mean of `part`, which `message` carries, over the gradient."""
        out = self.item.values[part.slice]
        if not message.used:
            out.zero_()
            return
        self.item.nonfinite |= message.nonfinite
        stats = self._stats_of(part, stage)
        with blame(self, message):
            self.compressor.decode(_payload(message), self._context(part, stage, message.sender), out, stats=stats)

    def decode_sum(self, part: Chunk, messages: Sequence[EncodedChunk]) -> None:
        """Write the sum of all ranks' payloads of `part` over the gradient."""
        used = [message for message in messages if message.used]
        out = self.item.values[part.slice]
        if out.dtype == torch.float32:
            self._decode_sum(part, used, out)
            return
        total = torch.empty(part.count, dtype=torch.float32)
        self._decode_sum(part, used, total)
        kernels.cast(total.numpy(), as_array(out))

    def _decode_sum(self, part: Chunk, messages: Sequence[EncodedChunk], out: torch.Tensor, stage: int = 0) -> None:
        for message in messages:
            self.item.nonfinite |= message.nonfinite
        contexts = [self._context(part, stage, message.sender) for message in messages]
        payloads = [_payload(message) for message in messages]
        stats = self._stats_of(part, stage)
        try:
            self.compressor.decode_sum(payloads, contexts, out, stats)
        except PayloadError:
            for message, context in zip(messages, contexts):  # which of them was it?
                with blame(self, message):
                    self.compressor.decode(_payload(message), context, torch.empty_like(out), stats=stats)
            raise

    # -- the preliminary round -------------------------------------------------------------------------------

    def stats(self, part: Chunk, encoded: bool = True) -> EncodedChunk:
        """What must be reduced over ranks before `part` can be encoded; compensates where this rank encodes it, too."""
        own = self._own(part)
        if own is None:
            return self._message(FrameKind.STATS, None)
        entries = self._policy.stats(own) if encoded else self.compressor.stats(own.grad, own.ctx, own.scale)
        flat = np.concatenate([entry.values.astype(np.float32, copy=False).reshape(-1) for entry in entries])
        return self._message(FrameKind.STATS, Payload(flat.view(np.uint8)))

    def _stats_of(self, part: Chunk, stage: int) -> Sequence[np.ndarray]:
        """The reduced statistics that payloads of a stage were encoded with: aggregates carry their own."""
        return self._stats.get(part.index, ()) if stage == self.first else ()

    def reduce_stats(self, part: Chunk, messages: Sequence[EncodedChunk]) -> None:
        """Reduce the statistics of all ranks, in rank order, so that every rank holds the same bits."""
        spec = self.compressor.stats_spec(self.item.spec(part))
        expected = 4 * sum(length for length, _ in spec)
        for message in messages:
            with blame(self, message):
                _expect_bytes(message, expected if message.used else 0)
        reduced: list[np.ndarray] = []
        rows = [message.body.view(np.float32) for message in messages if message.used]
        start = 0
        for length, reduction in spec:
            pieces = [row[start : start + length] for row in rows]
            total = pieces[0].copy() if pieces else np.zeros(length, dtype=np.float32)
            for piece in pieces[1:]:
                _REDUCE[reduction](total, piece, out=total)
            reduced.append(total)
            start += length
        self._stats[part.index] = reduced

    # -- dense within a node ---------------------------------------------------------------------------------

    def dense(self, part: Chunk) -> EncodedChunk:
        """Take this rank's gradient of `part` as it is, with what another plan has left in its residual."""
        self.item.wait_loaded()
        if not self.item.used:
            return self._message(FrameKind.PAYLOAD, None)
        own = self._input(part, self.item.values[part.slice], "local", 0, 1 / self.world_size)
        left = self._residuals.source(own.key) if self.item.entry.feedback == "error" else None
        policy = policies.get("none" if left is None or not left.any() else "error")
        return self._message(FrameKind.PAYLOAD, policy.encode(own._replace(compressor=DENSE)))

    def add_up(self, part: Chunk, messages: Sequence[EncodedChunk]) -> None:
        """Add this rank's gradient to the dense ones of its node's other ranks; the sum stands for it from now on."""
        own = self._own(part)
        used = [message for message in messages if message.used]
        if own is None and not used:
            self._sums[part.index] = None
            return
        total = torch.zeros(part.count)
        for message in used:
            with blame(self, message):
                DENSE.decode(_payload(message), self._context(part, 0, message.sender), total, accumulate=True)
        if own is not None:
            kernels.compensate(as_array(own.grad), own.scale, total.numpy(), total.numpy())
        self._sums[part.index] = total

    def spread(self, part: Chunk, mean: EncodedChunk) -> EncodedChunk:
        """The decoded mean of `part`, which came in `mean`, as it is."""
        if not mean.used:
            return self._message(FrameKind.PAYLOAD, None)
        payload = DENSE.encode(self.item.values[part.slice], self._context(part, 0))
        return EncodedChunk(FrameKind.PAYLOAD, mean.flags, payload.body, self.rank)

    def place(self, part: Chunk, message: EncodedChunk) -> None:
        """Write the mean of `part`, which came as it is, over the gradient."""
        out = self.item.values[part.slice]
        if not message.used:
            out.zero_()
            return
        self.item.nonfinite |= message.nonfinite
        with blame(self, message):
            DENSE.decode(_payload(message), self._context(part, 0, message.sender), out)

    # -- helpers ---------------------------------------------------------------------------------------------

    def _message(self, kind: FrameKind, payload: Payload | None) -> EncodedChunk:
        """A message of this rank; None stands for a parameter that its backward did not use."""
        if payload is None:
            return EncodedChunk(kind, FrameFlags.PRESENT, EMPTY, self.rank)
        flags = FrameFlags.PRESENT | FrameFlags.USED
        if payload.nonfinite:
            flags |= FrameFlags.NONFINITE
        return EncodedChunk(kind, flags, payload.body, self.rank)

    def _context(self, part: Chunk, stage: int, rank: int | None = None) -> Context:
        return Context(
            name=self.item.name,
            step=self.item.step,
            rank=self.rank if rank is None else rank,
            world_size=self.world_size,
            seed=self._seed,
            offset=self.item.offset + part.offset,
            stage=stage,
            spec=self.item.spec(part),
            state=self._state(part),
        )

    def _state(self, part: Chunk) -> np.ndarray | None:
        if self._state_source is None:
            return None
        where = self.item.range(part) if self._state_source == "payload" else self.item.whole_range
        return self._residuals.states.get(self.item.name, where, self.item.step)

    def arrived(self) -> None:
        """Stage the state of a compressor that takes it from the mean, which the item holds now."""
        if self._state_source == "mean" and not self.item.nonfinite:
            whole = Chunk(0, 0, self.item.values.numel())
            self._stage_state(as_array(self.item.values), self._context(whole, self.first), self.item.whole_range)


class AccumulatorCodec(LossyCodec):
    """Accumulators are added as they are: nothing is decoded before the mean is there, and nothing is encoded twice."""

    def __init__(self, item: TensorJob, residuals: Residuals, rank: int, world_size: int, seed: int) -> None:
        super().__init__(item, residuals, rank, world_size, seed)
        assert isinstance(item.entry.compressor, SummableCompressor)
        self._summable: SummableCompressor = item.entry.compressor

    def kind(self, stage: int) -> FrameKind:
        return FrameKind.PAYLOAD if stage == self.first else FrameKind.AGGREGATE

    def encodes_own(self, stage: int) -> bool:
        return True

    def merge(self, part: Chunk, messages: Sequence[EncodedChunk], stage: int) -> EncodedChunk:
        mine = self.start(part)
        contributions = [message for message in (mine, *messages) if message.used]
        if not contributions:
            return self._message(FrameKind.AGGREGATE, None)
        if any(message.nonfinite for message in contributions):
            return self._message(FrameKind.AGGREGATE, Payload(EMPTY, nonfinite=True))
        total = self._sum(part, contributions, self._dtype(stage), self._dtype(stage - 1))
        return self._message(FrameKind.AGGREGATE, Payload(total.view(np.uint8)))

    def decode(self, part: Chunk, message: EncodedChunk, stage: int) -> None:
        self._finalize(part, [message], self._dtype(stage))

    def decode_sum(self, part: Chunk, messages: Sequence[EncodedChunk]) -> None:
        dtype = self._summable.accumulator_dtype(self.world_size)
        self._finalize(part, [message for message in messages if message.used], dtype)

    def _dtype(self, stage: int) -> np.dtype:
        return self.item.entry.accumulator_dtype(stage, self.world_size)

    def _sum(self, part: Chunk, messages: Sequence[EncodedChunk], dtype: np.dtype, arrived: np.dtype) -> np.ndarray:
        total = np.zeros(self._summable.accumulator_size(self.item.spec(part)), dtype)
        for message in messages:
            with blame(self, message):
                if message.kind == FrameKind.AGGREGATE:
                    _expect_bytes(message, total.size * arrived.itemsize)
                    total += message.body.view(arrived)
                else:
                    context = self._context(part, self.first, message.sender)
                    self._summable.accumulate(_payload(message), context, total)
        return total

    def _finalize(self, part: Chunk, messages: Sequence[EncodedChunk], dtype: np.dtype) -> None:
        out = self.item.values[part.slice]
        if not any(message.used for message in messages):
            out.zero_()
        elif any(message.nonfinite for message in messages):
            self.item.nonfinite = True
            out.fill_(torch.nan)
        else:
            total = self._sum(part, messages, dtype, dtype)
            mean = out if out.dtype == torch.float32 else torch.empty(part.count)
            context, stats = self._context(part, self.first), self._stats[part.index]
            self._summable.finalize(total, self.num_encoders, context, stats, mean)
            if mean is not out:
                kernels.cast(mean.numpy(), as_array(out))
            if self._state_source == "accumulator":
                self._stage_state(total, context, self.item.range(part))


def make_codec(item: TensorJob, residuals: Residuals, rank: int, world_size: int, seed: int) -> LossyCodec:
    """The codec that fits the item's compressor."""
    kind = AccumulatorCodec if isinstance(item.entry.compressor, SummableCompressor) else LossyCodec
    return kind(item, residuals, rank, world_size, seed)


def _expect_bytes(message: EncodedChunk, expected: int) -> None:
    """The header has been checked, but it may be that of another range."""
    if message.body.nbytes != expected:
        raise PayloadError(f"Expected {message.kind.name} of {expected} bytes, got {message.body.nbytes}.")


def _payload(message: EncodedChunk) -> Payload:
    return Payload(message.body, message.nonfinite)


class blame:  # noqa: N801  # reads as a verb
    """Turn a decoder's `PayloadError` into one that names the rank whose bytes they were."""

    def __init__(self, codec: LossyCodec, message: EncodedChunk) -> None:
        self._codec, self._message = codec, message

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PayloadError):
            raise SyncError(
                f"Rank {self._message.sender} sent bytes that are no payload of {self._codec.item.name}: {error}",
                rank=self._message.sender,
                tensor=self._codec.item.name,
                phase="decode",
            ) from error
