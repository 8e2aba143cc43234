"""Costs of the tasks and frames of a job, from measured costs and the compressor's sizes."""

from __future__ import annotations

import math
from copy import copy

import torch

from gradwire.compressors.base import Compressor, SummableCompressor
from gradwire.compressors.base.registry import DENSE_NAME, spec_of
from gradwire.core.spec import TensorSpec
from gradwire.planner import pairs
from gradwire.planner.costs import CodecCosts, Costs
from gradwire.planner.curves import Curve
from gradwire.planner.options import EXACT, PlannedTensor, codec_for
from gradwire.simulate.graphs import Shapes, Work
from gradwire.simulate.served import ServedPrices
from gradwire.sync.fusion import LENGTH_BYTES
from gradwire.sync.sparse_codec import COUNT_BYTES
from gradwire.wire.frame import FrameKind

_PROBES = (1 << 12, 1 << 16, 1 << 20)


class PriceList:
    """Costs of one job. A chunk has the shapes of its tensors: one, except in a fusion group.

    Args:
        compressor: Compressor of the job.
        costs: Measured costs.
        dtype: Element type of the gradients.
        fused: Whether the job is a compressed fusion group.
        in_place: Whether its gradients are dense, and added where they are (`PlanEntry.adds_in_place`).
        served: Costs of its packets, if it travels through an aggregation server.

    Raises:
        UnknownNameError: The compressor was not measured.
    """

    def __init__(
        self,
        compressor: Compressor,
        costs: Costs,
        dtype: torch.dtype,
        *,
        fused: bool = False,
        in_place: bool = False,
        served: ServedPrices | None = None,
    ) -> None:
        self.served = served
        self._compressor = compressor
        self._codec = costs.codec(spec_of(compressor))
        self._costs = costs
        self._dtype = dtype
        self._in_place = in_place
        self._length_bytes = LENGTH_BYTES if fused else 0
        sends_all = dtype.itemsize > 4 and spec_of(compressor) in EXACT
        self._is_fixed = sends_all or _is_fixed(compressor, self._codec)

    def seconds(self, work: Work, shapes: Shapes) -> float:
        """Seconds of the processor for a task, the engine's own cost per task included."""
        if work.call == "hand":
            return self._costs.task
        if work.packets:
            assert self.served is not None
            return self.served.seconds(work)
        if work.call in ("send", "recv"):
            return self._carry(work, shapes) if self.carries else self._costs.task + self._costs.frame(0)
        priced = getattr(self._of_group(len(shapes)), f"_{work.call}")
        return self._costs.task + float(sum(priced(work, math.prod(shape)) for shape in shapes))

    def _of_group(self, num_tensors: int) -> PriceList:
        """Return the prices of each of `num_tensors` tensors that share the calls of the codec."""
        prices = copy(self)
        prices._codec = self._codec.fused(num_tensors)
        return prices

    @property
    def carries(self) -> bool:
        """Whether frames cost processor time by their size."""
        return self._costs.frame(1 << 20) > 1.01 * self._costs.frame(0)

    def _carry(self, work: Work, shapes: Shapes) -> float:
        """A fragment of a frame. The engine's cost per task belongs to recvs; sends paid it at hand-over."""
        seconds = self._costs.frame(self.frame_bytes(work._replace(share=1.0), shapes))
        return work.share * (seconds + (self._costs.task if work.call == "recv" else 0.0))

    def frame_bytes(self, work: Work, shapes: Shapes) -> float:
        """Bytes of a frame with its header, or of a fragment of a frame."""
        if work.packets:
            assert self.served is not None
            return self.served.frame_bytes(work)
        bodies = sum(self._length_bytes + self._body_bytes(work, shape) for shape in shapes)
        return work.share * (self._costs.frame_bytes + bodies)

    def _body_bytes(self, work: Work, shape: tuple[int, ...]) -> float:
        spec = TensorSpec(shape, self._dtype)
        if work.dense:
            return spec.nbytes
        if work.frame is FrameKind.STATS:
            return 4 * sum(length for length, _ in self._compressor.stats_spec(spec))
        if work.owners:
            payload = self._payload_bytes(spec)
            if work.frame is FrameKind.AGGREGATE:
                payload = pairs.sum_bytes(payload, spec.numel, work.owners, self._costs.overlap)
            return COUNT_BYTES + payload / work.owners
        if work.frame is FrameKind.AGGREGATE:
            assert isinstance(self._compressor, SummableCompressor)
            return self._compressor.accumulator_size(spec) * work.accumulator_bytes
        return self._payload_bytes(spec)

    def _payload_bytes(self, spec: TensorSpec) -> float:
        if self._is_fixed:
            return self._compressor.max_encoded_bytes(spec)
        codec = codec_for(PlannedTensor("", spec.shape, self._dtype), spec_of(self._compressor), self._costs)
        return min(codec.payload_bytes(spec.numel), self._compressor.max_encoded_bytes(spec))

    def _start(self, work: Work, count: int) -> float:
        if self._in_place:
            return 0.0
        return self._codec.encode(count) + (self._codec.merge(count) if work.owners else 0.0)

    def _part(self, work: Work, count: int) -> float:
        return self._codec.merge(count) / work.owners

    def _sum_parts(self, work: Work, count: int) -> float:
        return self._codec.merge(count) + self._costs.add(count) / work.owners

    def _decode_sums(self, work: Work, count: int) -> float:
        payload = self._payload_bytes(TensorSpec((count,), self._dtype))
        return self._codec.merge(count) * pairs.growth(payload, count, work.owners, self._costs.overlap)

    def _merge(self, work: Work, count: int) -> float:
        if self._in_place:
            return self._costs.sum_in_place(count * self._dtype.itemsize, work.num_payloads)
        taken = work.num_payloads * self._codec.merge(count)
        return taken + self._costs.add(count) + self._codec.encode(count)

    def _encode_and_merge(self, work: Work, count: int) -> float:
        own = self._codec.encode(count)
        if work.frame is FrameKind.AGGREGATE:
            return own + self._sum_accumulators(work, count) + _cost(self._codec.accumulate, count)
        return own + (1 + work.num_payloads) * self._codec.merge(count) + self._codec.encode(count)

    def _decode(self, work: Work, count: int) -> float:
        if self._in_place:
            return 0.0
        if not self._codec.summable:
            return self._codec.decode(count)
        return self._sum_accumulators(work, count) + _cost(self._codec.finalize, count)

    def _take(self, work: Work, count: int) -> float:
        return _cost(self._codec.finalize, count)

    def _take_stats(self, work: Work, count: int) -> float:
        return 0.0

    def _decode_sum(self, work: Work, count: int) -> float:
        if not self._codec.summable:
            return work.num_payloads * self._codec.merge(count)
        return self._sum_accumulators(work, count) + _cost(self._codec.finalize, count)

    def _sum_accumulators(self, work: Work, count: int) -> float:
        """Seconds to accumulate payloads, or to add accumulators that arrived."""
        if work.taken is not FrameKind.AGGREGATE:
            return work.num_payloads * _cost(self._codec.accumulate, count)
        return work.num_payloads * self._costs.add_bytes(_cost(self._codec.accumulator_bytes, count))

    def _encode_dense(self, work: Work, count: int) -> float:
        return self._costs.codec(DENSE_NAME).encode(count)

    def _merge_dense(self, work: Work, count: int) -> float:
        return self._costs.add(count) + work.num_payloads * self._costs.codec(DENSE_NAME).merge(count)

    def _encode_mean(self, work: Work, count: int) -> float:
        return self._costs.codec(DENSE_NAME).encode(count)

    def _decode_dense(self, work: Work, count: int) -> float:
        return self._costs.codec(DENSE_NAME).decode(count)

    def _stats(self, work: Work, count: int) -> float:
        return _cost(self._codec.stats, count)

    def _stats_of_gradient(self, work: Work, count: int) -> float:
        return self._stats(work, count)

    def _reduce_stats(self, work: Work, count: int) -> float:
        return 0.0

    def _merge_stats(self, work: Work, count: int) -> float:
        return 0.0

    def _take_reduced_stats(self, work: Work, count: int) -> float:
        return 0.0


def _cost(cost: object, count: int) -> float:
    assert callable(cost), "the codec was measured without one of its operations"
    return float(cost(count))


def _is_fixed(compressor: Compressor, codec: CodecCosts) -> bool:
    """Whether measured payloads have the largest size that the compressor declares."""
    measured = codec.payload_bytes
    points = measured.points if isinstance(measured, Curve) else [(x, measured(x)) for x in _PROBES]
    return all(abs(compressor.max_encoded_bytes(TensorSpec((int(x),))) - nbytes) < 0.5 for x, nbytes in points)
