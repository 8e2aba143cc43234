"""Encoding, merging and decoding the chunks of one job: compressor, residuals and flags together.

The methods that operations call (`gradwire.sync.operations`) take a chunk, the payloads that it is made of, and the
stage of the payload that they make or read.

Each encode owns a residual if the plan asks for feedback: it compensates, encodes and stages in one call. Residuals and
payloads are in units of the mean: gradients are scaled by 1/W as they are encoded. Therefore payloads only need to be
added, and a residual means the same under every strategy and world size.

`PayloadCodec` decodes payloads, adds in float32, and encodes the sum with a residual of role ``aggregate``.
`gradwire.sync.adding_codecs` has the codecs that add without decoding.
"""

# Shapes: N = elements of the chunk, W = ranks.

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from gradwire.compressors.base import Compressor, Stat, StatefulCompressor
from gradwire.compressors.base.registry import DENSE_NAME, make
from gradwire.core import buffers
from gradwire.core.context import Context
from gradwire.core.errors import PayloadError, StateMismatchError, SyncError
from gradwire.core.spec import ElementRange, as_array
from gradwire.kernels import active as kernels
from gradwire.residuals import policies
from gradwire.residuals.policies import EncodeInput
from gradwire.residuals.slices import ResidualKey, Role
from gradwire.residuals.transaction import Residuals
from gradwire.sync.chunk import Chunk
from gradwire.sync.job import TensorJob
from gradwire.wire.payload import Payload

EMPTY = np.empty(0, dtype=np.uint8)
UNUSED = Payload(EMPTY, used=False)
"""What a rank sends whose backward pass did not use the parameter."""
MISMATCH = Payload(np.zeros(1, dtype=np.uint8), nonfinite=True)
"""What a merging rank sends that has other optimizer state than a sender. Other non-finite payloads have no body."""
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
        self.layout = job.layout
        self.compressor: Compressor = job.layout.entry.compressor
        self.rank = rank
        self.world_size = world_size
        self.first_stage = 0
        self.num_encoders = world_size
        self._policy = job.layout.policy
        self._residuals = residuals
        self._seed = seed
        compressor = self.compressor
        self._state_source = compressor.state_source if isinstance(compressor, StatefulCompressor) else None
        self._scale: float | None = None  # of this rank's gradient
        self._scale_lock = threading.Lock()
        # By index of the chunk:
        self._stats: dict[int, Sequence[np.ndarray]] = {}  # reduced over ranks
        self._node_sums: dict[int, torch.Tensor | None] = {}
        self._own_inputs: dict[int, EncodeInput] = {}

    def encode_from(self, stage: int, num_encoders: int) -> None:
        """Compress from `stage` on, on `num_encoders` ranks per chunk. Earlier stages are dense."""
        self.first_stage, self.num_encoders = stage, num_encoders

    # -- own gradient ----------------------------------------------------------------------------------------

    def _own(self, chunk: Chunk) -> EncodeInput | None:
        """Return what this rank contributes to a chunk: its node's sum if there is one. None if it has nothing."""
        if chunk.index in self._node_sums:
            total = self._node_sums[chunk.index]
            return None if total is None else self._input(chunk, total, "local", self.first_stage)
        if not self.job.used:
            return None
        if chunk.index not in self._own_inputs:
            grad = self.job.values[chunk.slice]
            own = self._input(chunk, grad, "local", self.first_stage, self._own_scale())
            self._own_inputs[chunk.index] = self._policy.contribution(own)
        return self._own_inputs[chunk.index]

    def _own_scale(self) -> float:
        # Once, before the first chunk is sent: when its mean has arrived, it replaces a part of the gradient.
        with self._scale_lock:
            if self._scale is None:
                factor = self._policy.factor(self.job.values, self.world_size, self._residuals.loss_scale)
                self._scale = factor / self.world_size
            return self._scale

    def _input(self, chunk: Chunk, grad: torch.Tensor, role: Role, stage: int, scale: float = 1.0) -> EncodeInput:
        key = ResidualKey(self.layout.name, self.layout.chunk_range(chunk), role)
        return EncodeInput(self.compressor, grad, self._context(chunk, stage), self._residuals, key, scale)

    def start(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        """Encode this rank's gradient, or its node's sum."""
        own = self._own(chunk)
        if own is None:  # the rank keeps its residual
            return UNUSED
        stats = self._stats.get(chunk.index, ())
        if not all(np.isfinite(values).all() for values in stats):
            return Payload(EMPTY, nonfinite=True)
        return self._encode(own, stats)

    def _encode(self, source: EncodeInput, stats: Sequence[np.ndarray] = (), common: bool = True) -> Payload:
        view = self.job.aux
        if view is not None:
            aux = view.aux(self.layout.name, source.key.range, common)
            share = view.error_share(source.key.role == "aggregate", self.num_encoders)
            source = source._replace(ctx=replace(source.ctx, aux=aux, error_share=share))
        payload = self._policy.encode(source, stats)
        if self._state_source == "payload":
            self._stage_state(payload, source.ctx, source.key.range)
        return payload

    # -- merging ---------------------------------------------------------------------------------------------

    def merge(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        """Add received chunks to this rank's gradient or its node's sum, and encode the total: an aggregate."""
        return self._merge(chunk, payloads, self._own(chunk), stage)

    def encode_and_merge(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        """Encode this rank's gradient or its node's sum, add it to received chunks, and encode the total."""
        return self._merge(chunk, [self.start(chunk), *payloads], None, stage)

    def _merge(self, chunk: Chunk, payloads: Sequence[Payload], own: EncodeInput | None, stage: int) -> Payload:
        used = [payload for payload in payloads if payload.used]
        if not used and own is None:
            return UNUSED
        total = floats(chunk.count)
        try:
            self._decode_sum(chunk, used, total, stage - 1)
        except StateMismatchError:
            self.job.nonfinite = self.job.mismatch = True
            return MISMATCH
        if own is not None:
            kernels.compensate(as_array(own.grad), own.scale, total.numpy(), total.numpy())
        # A rank that has shown nothing of its optimizer state may have another one.
        common = self.job.aux is not None and all(
            payload.used and self.compressor.decodes_with_aux(payload) for payload in payloads
        )
        return self._encode(self._input(chunk, total, "aggregate", stage), common=common)

    def decode(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> None:
        """Overwrite the gradient with the mean that the one payload carries."""
        (payload,) = payloads
        self._decode(self.compressor, chunk, payload, stage, self._stats_of(chunk, stage))

    def _decode(
        self, compressor: Compressor, chunk: Chunk, payload: Payload, stage: int, stats: Sequence[np.ndarray] = ()
    ) -> None:
        out = self.job.values[chunk.slice]
        if not payload.used:
            out.zero_()
            return
        self._note(payload)
        try:
            with blame(self, payload):
                (context,) = self._contexts(chunk, [payload], stage)
                compressor.decode(payload, context, out, stats=stats)
        except StateMismatchError:
            self.job.nonfinite = self.job.mismatch = True
            out.fill_(torch.nan)
            return
        self._note_overflow(out)

    def decode_sum(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> None:
        """Overwrite the gradient with the sum of all ranks' payloads."""
        used = [payload for payload in payloads if payload.used]
        out = self.job.values[chunk.slice]
        total = out if out.dtype == torch.float32 else floats(chunk.count)
        self._decode_sum(chunk, used, total)
        if total is not out:
            kernels.cast(total.numpy(), as_array(out))
        self._note_overflow(out, computed=len(used) > 1)

    def _decode_sum(self, chunk: Chunk, payloads: Sequence[Payload], out: torch.Tensor, stage: int = 0) -> None:
        for payload in payloads:
            self._note(payload)
        contexts = self._contexts(chunk, payloads, stage)
        stats = self._stats_of(chunk, stage)
        try:
            self.compressor.decode_sum(payloads, contexts, out, stats)
        except StateMismatchError:
            raise
        except PayloadError:
            for payload, context in zip(payloads, contexts):  # find the sender of the bad payload
                with blame(self, payload):
                    self.compressor.decode(payload, context, torch.empty_like(out), stats=stats)
            raise

    def max_payload_bytes(self, chunk: Chunk, stage: int) -> int:
        """Most bytes of a payload that leaves a stage."""
        return self.compressor.max_encoded_bytes(self.layout.spec(chunk))

    def check(self, chunk: Chunk, payload: Payload) -> None:
        """Raise the error that names the sender if a payload is not what it should be."""
        if payload.used:
            with blame(self, payload):
                (context,) = self._contexts(chunk, [payload], 0)
                self.compressor.decode(payload, context, torch.empty_like(self.job.values[chunk.slice]))

    # -- the preliminary round -------------------------------------------------------------------------------

    def stats(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        """Return the statistics that ranks must reduce before this rank can encode. Compensates the gradient."""
        own = self._own(chunk)
        return UNUSED if own is None else _joined(self._policy.stats(own))

    def stats_of_gradient(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        """Return the statistics of a chunk that this rank only adds: those of its gradient alone."""
        own = self._own(chunk)
        return UNUSED if own is None else _joined(self.compressor.stats(own.grad, own.ctx, own.scale))

    def stats_bytes(self, chunk: Chunk) -> int:
        """Bytes of the statistics of a rank that uses the parameter."""
        return 4 * sum(length for length, _ in self.compressor.stats_spec(self.layout.spec(chunk)))

    def _stats_of(self, chunk: Chunk, stage: int) -> Sequence[np.ndarray]:
        """Return the reduced statistics of payloads from a stage.

        A sum that was encoded again was encoded with its own statistics, which are in the payload.
        """
        return self._stats.get(chunk.index, ()) if stage == self.first_stage else ()

    def reduce_stats(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> None:
        """Reduce the statistics of all ranks, in rank order, so that every rank holds the same bits."""
        spec, expected = self.layout.spec(chunk), self.stats_bytes(chunk)
        for payload in payloads:
            with blame(self, payload):
                expect_bytes(payload, expected if payload.used else 0)
        reduced: list[np.ndarray] = []
        rows = [payload.body.view(np.float32) for payload in payloads if payload.used]
        start = 0
        for length, reduction in self.compressor.stats_spec(spec):
            pieces = [row[start : start + length] for row in rows]
            total = pieces[0].copy() if pieces else np.zeros(length, dtype=np.float32)
            for piece in pieces[1:]:
                _REDUCE[reduction](total, piece, out=total)
            reduced.append(total)
            start += length
        self._stats[chunk.index] = self.compressor.finish_stats(reduced, spec)

    def merge_stats(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> Payload:
        """Reduce the statistics of all ranks as the owner of a chunk. Returns the result, for the other ranks."""
        self.reduce_stats(chunk, payloads, stage)
        if not any(payload.used for payload in payloads):
            return UNUSED
        return Payload(np.concatenate(self._stats[chunk.index]).view(np.uint8))

    def take_reduced_stats(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> None:
        """Take the result of `merge_stats` from the owner of a chunk."""
        (payload,) = payloads
        if not payload.used:
            self.reduce_stats(chunk, [])
            return
        with blame(self, payload):
            expect_bytes(payload, self.stats_bytes(chunk))
        lengths = [length for length, _ in self.compressor.stats_spec(self.layout.spec(chunk))]
        self._stats[chunk.index] = np.split(payload.body.view(np.float32), np.cumsum(lengths)[:-1])

    def set_stats(self, chunk: Chunk, stats: Sequence[np.ndarray]) -> None:
        """Set the reduced statistics, where they were computed for several tensors at once."""
        self._stats[chunk.index] = stats

    # -- dense within a node ---------------------------------------------------------------------------------

    def encode_dense(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        """Encode this rank's gradient without compression, together with a residual that another plan has left."""
        if not self.job.used:
            return UNUSED
        own = self._input(chunk, self.job.values[chunk.slice], "local", 0, 1 / self.world_size)
        left = self._residuals.source(own.key) if self._policy.name in ("error", "flush") else None
        policy = policies.get("none" if left is None or not left.any() else "error")
        return policy.encode(own._replace(compressor=DENSE))

    def merge_dense(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> None:
        """Add the dense gradients of the node's other ranks to this rank's. The sum replaces it from now on."""
        own = self._own(chunk)
        used = [payload for payload in payloads if payload.used]
        if own is None and not used:
            self._node_sums[chunk.index] = None
            return
        total = floats(chunk.count).zero_()
        for payload in used:
            with blame(self, payload):
                DENSE.decode(payload, self._context(chunk, 0, payload.sender), total, accumulate=True)
        if own is not None:
            kernels.compensate(as_array(own.grad), own.scale, total.numpy(), total.numpy())
        self._node_sums[chunk.index] = total

    def encode_mean(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> Payload:
        """Encode the decoded mean, which came in the one payload, without compression."""
        (mean,) = payloads
        if not mean.used:
            return UNUSED
        return DENSE.encode(self.job.values[chunk.slice], self._context(chunk, 0))

    def decode_dense(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> None:
        """Overwrite the gradient with a mean that is not compressed."""
        (payload,) = payloads
        self._decode(DENSE, chunk, payload, 0)

    # -- helpers ---------------------------------------------------------------------------------------------

    def _note(self, payload: Payload) -> None:
        # Not `|=`: chunks of a job are decoded on several threads.
        if payload.nonfinite:
            self.job.nonfinite = True

    def _note_overflow(self, mean: torch.Tensor, computed: bool = False) -> None:
        """Mark the job if the mean is not finite, although no payload is marked. All ranks hold the same bits of it.

        Decoders clamp to float32. So an element can only be infinite if its type is narrower, or if it was `computed`
        from decoded ones.
        """
        if (computed or mean.dtype.itemsize < 4) and kernels.count_nonfinite(as_array(mean)):
            self.job.nonfinite = True

    def _contexts(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> list[Context]:
        """Contexts to decode payloads that have left a stage.

        Raises:
            StateMismatchError: A payload says that ranks hold different optimizer state.
        """
        contexts = [self._context(chunk, stage, payload.sender) for payload in payloads]
        view = self.job.aux
        if view is None:
            return contexts
        if any(payload.nonfinite and payload.body.nbytes == MISMATCH.body.nbytes for payload in payloads):
            raise StateMismatchError("Ranks have different parameters or optimizer states.")
        if any(map(self.compressor.decodes_with_aux, payloads)):
            aux = view.aux(self.layout.name, self.layout.chunk_range(chunk))
            share = view.error_share(stage > self.first_stage, self.num_encoders)
            contexts = [replace(context, aux=aux, error_share=share) for context in contexts]
        return contexts

    def context(self, chunk: Chunk) -> Context:
        """Context of this rank's encode of a chunk."""
        return self._context(chunk, self.first_stage)

    def _context(self, chunk: Chunk, stage: int, rank: int | None = None) -> Context:
        return Context(
            name=self.layout.name,
            step=self.job.step,
            rank=self.rank if rank is None else rank,
            world_size=self.world_size,
            seed=self._seed,
            offset=self.layout.offset + chunk.offset,
            stage=stage,
            spec=self.layout.spec(chunk),
            state=self._state(chunk),
        )

    def _state(self, chunk: Chunk) -> np.ndarray | None:
        if self._state_source is None:
            return None
        elements = self.layout.chunk_range(chunk) if self._state_source == "payload" else self.layout.range
        return self._residuals.states.get(self.layout.name, elements, self.job.step)

    def _stage_state(self, source: Payload | np.ndarray, context: Context, elements: ElementRange) -> None:
        assert isinstance(self.compressor, StatefulCompressor)
        state = self.compressor.next_state(source, context)
        self._residuals.states.stage(context.name, elements, state, context.step)

    def finish(self) -> None:
        """Stage the state of a compressor that computes it from the mean. The job holds the mean now."""
        if self._state_source == "mean" and not self.job.nonfinite:
            full = Chunk(0, 0, self.job.values.numel())
            self._stage_state(as_array(self.job.values), self._context(full, self.first_stage), self.layout.range)


def floats(count: int) -> torch.Tensor:
    """Return a float32 tensor with arbitrary contents."""
    return torch.from_numpy(buffers.empty(count, np.float32))


def expect_bytes(payload: Payload, expected: int) -> None:
    """Check the length of a body. The header was checked, but it may be that of another range."""
    if payload.body.nbytes != expected:
        raise PayloadError(f"Expected {expected} bytes, got {payload.body.nbytes}.")


def _joined(stats: Sequence[Stat]) -> Payload:
    """Return statistics as one payload."""
    flat = np.concatenate([stat.values.astype(np.float32, copy=False).reshape(-1) for stat in stats])
    return Payload(flat.view(np.uint8))


@contextmanager
def blame(codec: PayloadCodec, payload: Payload) -> Iterator[None]:
    """Turn a decoder's `PayloadError` into an error that names the rank that sent the bytes."""
    try:
        yield
    except StateMismatchError:
        raise
    except PayloadError as error:
        raise SyncError(
            f"Rank {payload.sender} sent bytes that are not a payload of {codec.layout.name}: {error} Run one gradwire "
            "version on all ranks, and check that rank's memory.",
            rank=payload.sender,
            tensor=codec.layout.name,
            phase="decode",
        ) from error
