"""Encoding, merging and decoding the chunks of one job: compressor, residuals and flags together.

Each encode owns a residual if the plan asks for feedback: it compensates, encodes and stages in one call. Residuals and
payloads are in units of the mean: gradients are scaled by 1/W as they are encoded. Therefore payloads only need to be
added, and a residual means the same under every strategy and world size.

`PayloadCodec` decodes payloads, adds in float32, and encodes the sum with a residual of role ``aggregate``.
`AccumulatorCodec`, for summable compressors, adds accumulators and decodes only their sum. `DenseCodec` sends dense
gradients from where they are.
"""

# Shapes: N = elements of the chunk, W = ranks.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from gradwire.sync.plan_entry import PlanEntry
from gradwire.wire.frame import FrameFlags, FrameKind
from gradwire.wire.payload import Payload

EMPTY = np.empty(0, dtype=np.uint8)
DENSE = make(DENSE_NAME)  # within a node
_REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class PayloadCodec:
    """Codec that decodes payloads in order to add them.

    Attributes:
        first_stage: Stage of the first compressed encode.
        num_encoders: Number of ranks that encode each chunk.
    """

    def __init__(self, job: TensorJob, residuals: Residuals, rank: int, world_size: int, seed: int) -> None:
        self.job = job
        self.compressor: Compressor = job.entry.compressor
        self.rank = rank
        self.world_size = world_size
        self.first_stage = 0
        self.num_encoders = world_size
        self._policy = policies.get(job.entry.feedback)
        self._residuals = residuals
        self._seed = seed
        compressor = self.compressor
        self._state_source = compressor.state_source if isinstance(compressor, StatefulCompressor) else None
        # By index of the chunk:
        self._stats: dict[int, list[np.ndarray]] = {}  # reduced over ranks
        self._node_sums: dict[int, torch.Tensor | None] = {}
        self._own_inputs: dict[int, EncodeInput] = {}

    def encode_from(self, stage: int, num_encoders: int) -> None:
        """Compress from `stage` on, on `num_encoders` ranks per chunk. Earlier stages are dense."""
        self.first_stage, self.num_encoders = stage, num_encoders

    def kind(self, stage: int) -> FrameKind:
        """Return the kind of the frames that leave a stage."""
        return FrameKind.PAYLOAD

    # -- own gradient ----------------------------------------------------------------------------------------

    def _own(self, chunk: Chunk) -> EncodeInput | None:
        """Return what this rank contributes to a chunk: its node's sum if there is one. None if it has nothing."""
        if chunk.index in self._node_sums:
            total = self._node_sums[chunk.index]
            return None if total is None else self._input(chunk, total, "local", self.first_stage)
        self.job.wait_loaded()
        if not self.job.used:
            return None
        if chunk.index not in self._own_inputs:
            grad = self.job.values[chunk.slice]
            own = self._input(chunk, grad, "local", self.first_stage, 1 / self.world_size)
            self._own_inputs[chunk.index] = self._policy.contribution(own)
        return self._own_inputs[chunk.index]

    def _input(self, chunk: Chunk, grad: torch.Tensor, role: Role, stage: int, scale: float = 1.0) -> EncodeInput:
        key = ResidualKey(self.job.name, self.job.range(chunk), role)
        return EncodeInput(self.compressor, grad, self._context(chunk, stage), self._residuals, key, scale)

    def start(self, chunk: Chunk) -> EncodedChunk:
        """Encode this rank's gradient, or its node's sum."""
        own = self._own(chunk)
        if own is None:  # the rank keeps its residual
            return self._message(FrameKind.PAYLOAD, None)
        stats = self._stats.get(chunk.index, ())
        if not all(np.isfinite(values).all() for values in stats):
            return self._message(FrameKind.PAYLOAD, Payload(EMPTY, nonfinite=True))
        return self._message(FrameKind.PAYLOAD, self._encode(own, stats))

    def _encode(self, source: EncodeInput, stats: Sequence[np.ndarray] = ()) -> Payload:
        if self.job.aux is not None:
            source = source._replace(ctx=replace(source.ctx, aux=self.job.aux(source.key.range)))
        payload = self._policy.encode(source, stats)
        if self._state_source == "payload":
            self._stage_state(payload, source.ctx, source.key.range)
        return payload

    # -- merging ---------------------------------------------------------------------------------------------

    def encodes_own(self, stage: int) -> bool:
        """Whether a merge at this stage encodes the rank's own gradient before adding it."""
        return self.compressor.encode_own_before_merge and stage == self.first_stage + 1

    def merge(self, chunk: Chunk, messages: Sequence[EncodedChunk], stage: int) -> EncodedChunk:
        """Add received chunks to this rank's gradient or its node's sum, and encode the total: an aggregate."""
        own = self._own(chunk)
        if self.encodes_own(stage):
            messages, own = [self.start(chunk), *messages], None
        used = [message for message in messages if message.used]
        if not used and own is None:
            return self._message(FrameKind.PAYLOAD, None)
        total = torch.empty(chunk.count, dtype=torch.float32)
        self._decode_sum(chunk, used, total, stage - 1)
        if own is not None:
            kernels.compensate(as_array(own.grad), own.scale, total.numpy(), total.numpy())
        return self._message(FrameKind.PAYLOAD, self._encode(self._input(chunk, total, "aggregate", stage)))

    def decode(self, chunk: Chunk, message: EncodedChunk, stage: int) -> None:
        """Overwrite the gradient with the mean that `message` carries."""
        self._decode(self.compressor, chunk, message, stage, self._stats_of(chunk, stage))

    def _decode(
        self, compressor: Compressor, chunk: Chunk, message: EncodedChunk, stage: int, stats: Sequence[np.ndarray] = ()
    ) -> None:
        out = self.job.values[chunk.slice]
        if not message.used:
            out.zero_()
            return
        self.job.nonfinite |= message.nonfinite
        with blame(self, message):
            compressor.decode(_payload(message), self._context(chunk, stage, message.sender), out, stats=stats)

    def decode_sum(self, chunk: Chunk, messages: Sequence[EncodedChunk]) -> None:
        """Overwrite the gradient with the sum of all ranks' payloads."""
        used = [message for message in messages if message.used]
        out = self.job.values[chunk.slice]
        if out.dtype == torch.float32:
            self._decode_sum(chunk, used, out)
            return
        total = torch.empty(chunk.count, dtype=torch.float32)
        self._decode_sum(chunk, used, total)
        kernels.cast(total.numpy(), as_array(out))

    def _decode_sum(self, chunk: Chunk, messages: Sequence[EncodedChunk], out: torch.Tensor, stage: int = 0) -> None:
        for message in messages:
            self.job.nonfinite |= message.nonfinite
        contexts = [self._context(chunk, stage, message.sender) for message in messages]
        payloads = [_payload(message) for message in messages]
        stats = self._stats_of(chunk, stage)
        try:
            self.compressor.decode_sum(payloads, contexts, out, stats)
        except PayloadError:
            for message, context in zip(messages, contexts):  # find the sender of the bad payload
                with blame(self, message):
                    self.compressor.decode(_payload(message), context, torch.empty_like(out), stats=stats)
            raise

    def check(self, chunk: Chunk, message: EncodedChunk) -> None:
        """Raise the error that names the sender if a message is not what it should be."""
        if message.used:
            with blame(self, message):
                context = self._context(chunk, 0, message.sender)
                self.compressor.decode(_payload(message), context, torch.empty_like(self.job.values[chunk.slice]))

    # -- the preliminary round -------------------------------------------------------------------------------

    def stats(self, chunk: Chunk, encoded: bool = True) -> EncodedChunk:
        """Return the statistics that ranks must reduce before a chunk can be encoded.

        Args:
            encoded: Whether this rank encodes the chunk afterward. If so, the gradient is compensated now.
        """
        own = self._own(chunk)
        if own is None:
            return self._message(FrameKind.STATS, None)
        entries = self._policy.stats(own) if encoded else self.compressor.stats(own.grad, own.ctx, own.scale)
        flat = np.concatenate([entry.values.astype(np.float32, copy=False).reshape(-1) for entry in entries])
        return self._message(FrameKind.STATS, Payload(flat.view(np.uint8)))

    def _stats_of(self, chunk: Chunk, stage: int) -> Sequence[np.ndarray]:
        """Return the reduced statistics of payloads from a stage.

        A sum that was encoded again was encoded with its own statistics, which are in the payload.
        """
        return self._stats.get(chunk.index, ()) if stage == self.first_stage else ()

    def reduce_stats(self, chunk: Chunk, messages: Sequence[EncodedChunk]) -> None:
        """Reduce the statistics of all ranks, in rank order, so that every rank holds the same bits."""
        spec = self.compressor.stats_spec(self.job.spec(chunk))
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
        self._stats[chunk.index] = reduced

    # -- dense within a node ---------------------------------------------------------------------------------

    def encode_dense(self, chunk: Chunk) -> EncodedChunk:
        """Encode this rank's gradient without compression, together with a residual that another plan has left."""
        self.job.wait_loaded()
        if not self.job.used:
            return self._message(FrameKind.PAYLOAD, None)
        own = self._input(chunk, self.job.values[chunk.slice], "local", 0, 1 / self.world_size)
        left = self._residuals.source(own.key) if self.job.entry.feedback == "error" else None
        policy = policies.get("none" if left is None or not left.any() else "error")
        return self._message(FrameKind.PAYLOAD, policy.encode(own._replace(compressor=DENSE)))

    def merge_dense(self, chunk: Chunk, messages: Sequence[EncodedChunk]) -> None:
        """Add the dense gradients of the node's other ranks to this rank's. The sum replaces it from now on."""
        own = self._own(chunk)
        used = [message for message in messages if message.used]
        if own is None and not used:
            self._node_sums[chunk.index] = None
            return
        total = torch.zeros(chunk.count)
        for message in used:
            with blame(self, message):
                DENSE.decode(_payload(message), self._context(chunk, 0, message.sender), total, accumulate=True)
        if own is not None:
            kernels.compensate(as_array(own.grad), own.scale, total.numpy(), total.numpy())
        self._node_sums[chunk.index] = total

    def encode_mean(self, chunk: Chunk, mean: EncodedChunk) -> EncodedChunk:
        """Encode the decoded mean, which came in `mean`, without compression."""
        if not mean.used:
            return self._message(FrameKind.PAYLOAD, None)
        payload = DENSE.encode(self.job.values[chunk.slice], self._context(chunk, 0))
        return EncodedChunk(FrameKind.PAYLOAD, mean.flags, payload.body, self.rank)

    def decode_dense(self, chunk: Chunk, message: EncodedChunk) -> None:
        """Overwrite the gradient with a mean that is not compressed."""
        self._decode(DENSE, chunk, message, 0)

    # -- helpers ---------------------------------------------------------------------------------------------

    def _message(self, kind: FrameKind, payload: Payload | None) -> EncodedChunk:
        """Return a message of this rank. None stands for a parameter that the backward pass did not use."""
        if payload is None:
            return EncodedChunk(kind, FrameFlags.PRESENT, EMPTY, self.rank)
        flags = FrameFlags.PRESENT | FrameFlags.USED
        if payload.nonfinite:
            flags |= FrameFlags.NONFINITE
        return EncodedChunk(kind, flags, payload.body, self.rank)

    def _context(self, chunk: Chunk, stage: int, rank: int | None = None) -> Context:
        return Context(
            name=self.job.name,
            step=self.job.step,
            rank=self.rank if rank is None else rank,
            world_size=self.world_size,
            seed=self._seed,
            offset=self.job.offset + chunk.offset,
            stage=stage,
            spec=self.job.spec(chunk),
            state=self._state(chunk),
        )

    def _state(self, chunk: Chunk) -> np.ndarray | None:
        if self._state_source is None:
            return None
        elements = self.job.range(chunk) if self._state_source == "payload" else self.job.full_range
        return self._residuals.states.get(self.job.name, elements, self.job.step)

    def _stage_state(self, source: Payload | np.ndarray, context: Context, elements: ElementRange) -> None:
        assert isinstance(self.compressor, StatefulCompressor)
        state = self.compressor.next_state(source, context)
        self._residuals.states.stage(context.name, elements, state, context.step)

    def finish(self) -> None:
        """Stage the state of a compressor that computes it from the mean. The job holds the mean now."""
        if self._state_source == "mean" and not self.job.nonfinite:
            full = Chunk(0, 0, self.job.values.numel())
            self._stage_state(as_array(self.job.values), self._context(full, self.first_stage), self.job.full_range)


class AccumulatorCodec(PayloadCodec):
    """Codec that adds accumulators: nothing is decoded before the sum is complete, and nothing is encoded twice."""

    def __init__(self, job: TensorJob, residuals: Residuals, rank: int, world_size: int, seed: int) -> None:
        super().__init__(job, residuals, rank, world_size, seed)
        assert isinstance(job.entry.compressor, SummableCompressor)
        self._summable: SummableCompressor = job.entry.compressor

    def kind(self, stage: int) -> FrameKind:
        return FrameKind.PAYLOAD if stage == self.first_stage else FrameKind.AGGREGATE

    def encodes_own(self, stage: int) -> bool:
        return True

    def merge(self, chunk: Chunk, messages: Sequence[EncodedChunk], stage: int) -> EncodedChunk:
        contributions = [message for message in (self.start(chunk), *messages) if message.used]
        if not contributions:
            return self._message(FrameKind.AGGREGATE, None)
        if any(message.nonfinite for message in contributions):
            return self._message(FrameKind.AGGREGATE, Payload(EMPTY, nonfinite=True))
        total = self._sum(chunk, contributions, self._dtype(stage), self._dtype(stage - 1))
        return self._message(FrameKind.AGGREGATE, Payload(total.view(np.uint8)))

    def decode(self, chunk: Chunk, message: EncodedChunk, stage: int) -> None:
        self._finalize(chunk, [message], self._dtype(stage))

    def decode_sum(self, chunk: Chunk, messages: Sequence[EncodedChunk]) -> None:
        dtype = self._summable.accumulator_dtype(self.world_size)
        self._finalize(chunk, [message for message in messages if message.used], dtype)

    def _dtype(self, stage: int) -> np.dtype:
        return self.job.entry.accumulator_dtype(stage, self.world_size)

    def _sum(self, chunk: Chunk, messages: Sequence[EncodedChunk], dtype: np.dtype, received: np.dtype) -> np.ndarray:
        """Add payloads, and accumulators of element type `received`, in an accumulator of element type `dtype`."""
        total = np.zeros(self._summable.accumulator_size(self.job.spec(chunk)), dtype)
        for message in messages:
            with blame(self, message):
                if message.kind == FrameKind.AGGREGATE:
                    _expect_bytes(message, total.size * received.itemsize)
                    total += message.body.view(received)
                else:
                    context = self._context(chunk, self.first_stage, message.sender)
                    self._summable.accumulate(_payload(message), context, total)
        return total

    def _finalize(self, chunk: Chunk, messages: Sequence[EncodedChunk], dtype: np.dtype) -> None:
        out = self.job.values[chunk.slice]
        if not any(message.used for message in messages):
            out.zero_()
        elif any(message.nonfinite for message in messages):
            self.job.nonfinite = True
            out.fill_(torch.nan)
        else:
            total = self._sum(chunk, messages, dtype, dtype)
            mean = out if out.dtype == torch.float32 else torch.empty(chunk.count)
            context, stats = self._context(chunk, self.first_stage), self._stats.get(chunk.index, ())
            self._summable.finalize(total, self.num_encoders, context, stats, mean)
            if mean is not out:
                kernels.cast(mean.numpy(), as_array(out))
            if self._state_source == "accumulator":
                self._stage_state(total, context, self.job.range(chunk))


class DenseCodec(PayloadCodec):
    """Codec of dense gradients without residuals: nothing is encoded, and a sum is written in one sweep.

    A rank sends its gradient from where it is. That is safe: the mean overwrites a chunk only after whoever adds this
    rank's gradient has received it. Where one rank adds all gradients of a chunk, it does so in the order of ranks, so
    that the mean does not depend on how a tensor is split.
    """

    @staticmethod
    def suits(entry: PlanEntry) -> bool:
        """Whether a tensor can have this codec."""
        return entry.compressor.dense and entry.feedback == "none" and entry.strategy in ("ring", "scatter_reduce")

    def start(self, chunk: Chunk) -> EncodedChunk:
        self.job.wait_loaded()
        return self._message(FrameKind.PAYLOAD, Payload(self._bytes(chunk)) if self.job.used else None)

    def merge(self, chunk: Chunk, messages: Sequence[EncodedChunk], stage: int) -> EncodedChunk:
        own = self.start(chunk)
        used = sorted((each for each in (own, *messages) if each.used), key=lambda each: each.sender)
        if not used:
            return self._message(FrameKind.PAYLOAD, None)
        body = np.empty(self._bytes(chunk).nbytes, np.uint8)
        for message in used:
            with blame(self, message):
                _expect_bytes(message, body.nbytes)
        out = body.view(as_array(self.job.values[:0]).dtype)
        # What comes from a later stage than the first is a sum of scaled gradients already.
        scales = [1.0 if stage > 1 and each is not own else 1 / self.world_size for each in used]
        is_finite = kernels.weighted_sum([each.body.view(out.dtype) for each in used], scales, out)
        return self._message(FrameKind.PAYLOAD, Payload(body, nonfinite=not is_finite))

    def decode(self, chunk: Chunk, message: EncodedChunk, stage: int) -> None:
        if not message.used:
            self.job.values[chunk.slice].zero_()
            return
        self.job.nonfinite |= message.nonfinite
        values = self._bytes(chunk)
        with blame(self, message):
            _expect_bytes(message, values.nbytes)
        values[:] = message.body

    def _bytes(self, chunk: Chunk) -> np.ndarray:
        return as_array(self.job.values[chunk.slice]).view(np.uint8)


def make_codec(job: TensorJob, residuals: Residuals, rank: int, world_size: int, seed: int) -> PayloadCodec:
    """Return the codec for the job's compressor."""
    kind: type[PayloadCodec] = PayloadCodec
    if isinstance(job.entry.compressor, SummableCompressor):
        kind = AccumulatorCodec
    elif DenseCodec.suits(job.entry):
        kind = DenseCodec
    return kind(job, residuals, rank, world_size, seed)


def _expect_bytes(message: EncodedChunk, expected: int) -> None:
    """Check the length of a body. The header was checked, but it may be that of another range."""
    if message.body.nbytes != expected:
        raise PayloadError(f"Expected {message.kind.name} of {expected} bytes, got {message.body.nbytes}.")


def _payload(message: EncodedChunk) -> Payload:
    return Payload(message.body, message.nonfinite)


@contextmanager
def blame(codec: PayloadCodec, message: EncodedChunk) -> Iterator[None]:
    """Turn a decoder's `PayloadError` into an error that names the rank that sent the bytes."""
    try:
        yield
    except PayloadError as error:
        raise SyncError(
            f"Rank {message.sender} sent bytes that are not a payload of {codec.job.name}: {error} Run one gradwire "
            "version on all ranks, and check that rank's memory.",
            rank=message.sender,
            tensor=codec.job.name,
            phase="decode",
        ) from error
