"""Codecs that add without decoding: accumulators, and dense gradients. `make_codec` chooses the codec of a tensor.

See `gradwire.sync.codec` for what the methods take and return.
"""

# Shapes: N = elements of the chunk, W = ranks.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gradwire.compressors.base import SummableCompressor
from gradwire.core import buffers
from gradwire.core.spec import as_array
from gradwire.kernels import active as kernels
from gradwire.residuals.transaction import Residuals
from gradwire.sync.chunk import Chunk
from gradwire.sync.codec import EMPTY, UNUSED, PayloadCodec, blame, expect_bytes, floats
from gradwire.sync.job import TensorJob
from gradwire.wire.payload import Payload


class AccumulatorCodec(PayloadCodec):
    """Codec that adds accumulators: nothing is decoded before the sum is complete, and nothing is encoded twice."""

    def __init__(self, job: TensorJob, residuals: Residuals, rank: int, world_size: int, seed: int) -> None:
        super().__init__(job, residuals, rank, world_size, seed)
        assert isinstance(self.compressor, SummableCompressor)
        self._summable: SummableCompressor = self.compressor

    def encode_and_merge(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        return self.add_up(chunk, self.start(chunk), payloads, stage)

    def add_up(self, chunk: Chunk, own: Payload, payloads: Sequence[Payload], stage: int) -> Payload:
        """Add received chunks to this rank's payload. The sum leaves a stage."""
        received = [payload for payload in payloads if payload.used]
        if not own.used and not received:
            return UNUSED
        if own.nonfinite or any(payload.nonfinite for payload in received):
            return Payload(EMPTY, nonfinite=True)
        total = self._zeros(chunk, self._dtype(stage))
        if own.used:
            self._add(chunk, own, self.first_stage, total)
        for payload in received:
            self._add(chunk, payload, stage - 1, total)
        return Payload(total.view(np.uint8))

    def max_payload_bytes(self, chunk: Chunk, stage: int) -> int:
        if stage == self.first_stage:
            return super().max_payload_bytes(chunk, stage)
        return self._summable.accumulator_size(self.layout.spec(chunk)) * self._dtype(stage).itemsize

    def decode(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> None:
        self._finalize(chunk, payloads, stage, self._dtype(stage))

    def decode_sum(self, chunk: Chunk, payloads: Sequence[Payload], stage: int = 0) -> None:
        self._finalize(chunk, payloads, self.first_stage, self._summable.accumulator_dtype(self.world_size))

    def _dtype(self, stage: int) -> np.dtype:
        """Return the element type of the accumulators that leave a stage."""
        return self.layout.entry.accumulator_dtype(stage, self.world_size)

    def _zeros(self, chunk: Chunk, dtype: np.dtype) -> np.ndarray:
        accumulator = buffers.empty(self._summable.accumulator_size(self.layout.spec(chunk)), dtype)
        accumulator.fill(0)
        return accumulator

    def _add(self, chunk: Chunk, payload: Payload, stage: int, total: np.ndarray) -> None:
        """Add what has left a stage: a payload at first, accumulators later."""
        with blame(self, payload):
            if stage == self.first_stage:
                self._summable.accumulate(payload, self._context(chunk, stage, payload.sender), total)
            else:
                dtype = self._dtype(stage)
                expect_bytes(payload, total.size * dtype.itemsize)
                total += payload.body.view(dtype)

    def _finalize(self, chunk: Chunk, payloads: Sequence[Payload], stage: int, dtype: np.dtype) -> None:
        """Add what has left a stage, in an accumulator of element type `dtype`, and decode the sum."""
        out, payloads = self.job.values[chunk.slice], [payload for payload in payloads if payload.used]
        if not payloads:
            out.zero_()
        elif any(payload.nonfinite for payload in payloads):
            self.job.nonfinite = True
            out.fill_(torch.nan)
        else:
            total = self._zeros(chunk, dtype)
            for payload in payloads:
                self._add(chunk, payload, stage, total)
            mean = out if out.dtype == torch.float32 else floats(chunk.count)
            context, stats = self._context(chunk, self.first_stage), self._stats.get(chunk.index, ())
            self._summable.finalize(total, self.num_encoders, context, stats, mean)
            if mean is not out:
                kernels.cast(mean.numpy(), as_array(out))
            self._note_overflow(out, computed=not self._summable.has_finite_sums)
            if self._state_source == "accumulator":
                self._stage_state(total, context, self.layout.chunk_range(chunk))


class DenseCodec(PayloadCodec):
    """Codec of dense gradients without residuals: nothing is encoded, and a sum is written in one sweep.

    A rank sends its gradient from where it is, and receives the mean there. That is safe: the mean of a chunk exists
    only after whoever adds this rank's gradient has received it. A large sum is written over the gradient and sent from
    there, which the run waits for (`lends`); a small one is written over a payload that it is made of, which nothing
    else uses. Where one rank adds all gradients of a chunk, it does so in the order of ranks, so that the mean does not
    depend on how a tensor is split.
    """

    def start(self, chunk: Chunk, payloads: Sequence[Payload] = (), stage: int = 0) -> Payload:
        return Payload(self._bytes(chunk)) if self.job.used else UNUSED

    def merge(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> Payload:
        own = self.start(chunk)
        used = sorted((each for each in (own, *payloads) if each.used), key=self._sender)
        if not used:
            return UNUSED
        body = self._bytes(chunk)
        for payload in used:
            with blame(self, payload):
                expect_bytes(payload, body.nbytes)
        if body.nbytes < buffers.MIN_BYTES:
            body = next((each.body for each in used if each is not own), np.empty_like(body))
        out = body.view(as_array(self.job.values[:0]).dtype)
        # What comes from a later stage than the first is a sum of scaled gradients already.
        scales = [1.0 if stage > 1 and each is not own else 1 / self.world_size for each in used]
        is_finite = kernels.weighted_sum([each.body.view(out.dtype) for each in used], scales, out)
        return Payload(body, nonfinite=not is_finite)

    def _sender(self, payload: Payload) -> int:
        return self.rank if payload.sender is None else payload.sender

    def decode(self, chunk: Chunk, payloads: Sequence[Payload], stage: int) -> None:
        (payload,) = payloads
        if not payload.used:
            self.job.values[chunk.slice].zero_()
            return
        self._note(payload)
        values = self._bytes(chunk)
        with blame(self, payload):
            expect_bytes(payload, values.nbytes)
        if not np.may_share_memory(values, payload.body):  # else it was received or added there
            values[:] = payload.body

    def lends(self, payload: Payload) -> bool:
        """Whether a payload is large, and memory of the gradient."""
        large = payload.body.nbytes >= buffers.MIN_BYTES
        return large and np.may_share_memory(payload.body, as_array(self.job.values))

    def destination(self, chunk: Chunk, nbytes: int) -> np.ndarray | None:
        """Return the memory of the gradient, uint8, which can receive a mean of this size; None if it cannot."""
        values = self._bytes(chunk)
        return values if values.nbytes == nbytes else None

    def _bytes(self, chunk: Chunk) -> np.ndarray:
        return as_array(self.job.values[chunk.slice]).view(np.uint8)


def make_codec(job: TensorJob, residuals: Residuals, rank: int, world_size: int, seed: int) -> PayloadCodec:
    """Return the codec for the job's compressor."""
    kind: type[PayloadCodec] = PayloadCodec
    if isinstance(job.layout.entry.compressor, SummableCompressor):
        kind = AccumulatorCodec
    elif job.layout.entry.adds_in_place:
        kind = DenseCodec
    return kind(job, residuals, rank, world_size, seed)
