"""What the work of a task graph costs, from measured costs and a compressor's own sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.compressors.base import Compressor, SummableCompressor
from gradwire.compressors.base.registry import DENSE_NAME, spec_of
from gradwire.core.spec import TensorSpec
from gradwire.planner.costs import CodecCosts, Costs, Curve
from gradwire.simulate.recording import Work
from gradwire.wire.frame import FrameKind

_MARK_BYTES = 4  # of each tensor in a bundle's message: see `gradwire.sync.fusion`
_PROBES = (1 << 12, 1 << 16, 1 << 20)


class PriceList:
    """Prices of one method. A part has the sizes of its tensors: one, but in a bundle.

    Args:
        compressor: of the method.
        costs: measured.
        dtype: of the gradients.
        bundled: whether tensors travel in bundles.

    Raises:
        UnknownNameError: the method was not measured.
    """

    def __init__(self, compressor: Compressor, costs: Costs, dtype: torch.dtype, *, bundled: bool = False) -> None:
        self._compressor = compressor
        self._codec = costs.codec(spec_of(compressor))
        self._costs = costs
        self._dtype = dtype
        self._mark_bytes = _MARK_BYTES if bundled else 0
        self._is_fixed = _is_fixed(compressor, self._codec)

    def seconds(self, work: Work, sizes: Sequence[int]) -> float:
        """Of the processor, which takes a moment for every task, whatever that does."""
        if work.call == "hand":
            return self._costs.task
        if work.call in ("send", "recv"):
            return self._carry(work, sizes) if self.carries else self._costs.task + self._costs.frame(0)
        priced = getattr(self, f"_{work.call}")
        return self._costs.task + float(sum(priced(work, count) for count in sizes))

    @property
    def carries(self) -> bool:
        """Whether frames cost the processor time by their size."""
        return self._costs.frame(1 << 20) > 1.01 * self._costs.frame(0)

    def _carry(self, work: Work, sizes: Sequence[int]) -> float:
        """A piece of a frame, and the engine's moment for one that came in: one that goes out had it at hand-over."""
        whole = self._costs.frame(self.frame_bytes(work._replace(share=1.0), sizes))
        return work.share * (whole + (self._costs.task if work.call == "recv" else 0.0))

    def frame_bytes(self, work: Work, sizes: Sequence[int]) -> float:
        """Of a frame, header included, or of a piece of one."""
        bodies = sum(self._mark_bytes + self._body_bytes(work, count) for count in sizes)
        return work.share * (self._costs.frame_bytes + bodies)

    def _body_bytes(self, work: Work, count: int) -> float:
        spec = TensorSpec((count,), self._dtype)
        if work.dense:
            return spec.nbytes
        if work.frame is FrameKind.STATS:
            return 4 * sum(length for length, _ in self._compressor.stats_spec(spec))
        if work.frame is FrameKind.AGGREGATE:
            assert isinstance(self._compressor, SummableCompressor)
            return self._compressor.accumulator_size(spec) * work.accumulator_bytes
        if self._is_fixed:
            return self._compressor.max_encoded_bytes(spec)
        return min(self._codec.payload_bytes(count), self._compressor.max_encoded_bytes(spec))

    def _start(self, work: Work, count: int) -> float:
        return self._codec.encode(count)

    def _merge(self, work: Work, count: int) -> float:
        own = self._codec.encode(count)
        if work.frame is FrameKind.AGGREGATE:
            return own + self._sum_accumulators(work, count) + _cost(self._codec.accumulate, count)
        taken = work.num_messages * self._codec.merge(count)
        added = own + self._codec.merge(count) if work.encodes_own else self._costs.add(count)
        return taken + added + self._codec.encode(count)

    def _decode(self, work: Work, count: int) -> float:
        if not self._codec.summable:
            return self._codec.decode(count)
        return self._sum_accumulators(work, count) + _cost(self._codec.finalize, count)

    def _decode_sum(self, work: Work, count: int) -> float:
        if not self._codec.summable:
            return work.num_messages * self._codec.merge(count)
        return self._sum_accumulators(work, count) + _cost(self._codec.finalize, count)

    def _sum_accumulators(self, work: Work, count: int) -> float:
        """Payloads are accumulated; accumulators that arrive are added as they are."""
        one = self._costs.add(count) if work.taken is FrameKind.AGGREGATE else _cost(self._codec.accumulate, count)
        return work.num_messages * one

    def _dense(self, work: Work, count: int) -> float:
        return self._costs.codec(DENSE_NAME).encode(count)

    def _add_up(self, work: Work, count: int) -> float:
        return self._costs.add(count) + work.num_messages * self._costs.codec(DENSE_NAME).merge(count)

    def _spread(self, work: Work, count: int) -> float:
        return self._costs.codec(DENSE_NAME).encode(count)

    def _place(self, work: Work, count: int) -> float:
        return self._costs.codec(DENSE_NAME).decode(count)

    def _stats(self, work: Work, count: int) -> float:
        return _cost(self._codec.stats, count)

    def _reduce_stats(self, work: Work, count: int) -> float:
        return 0.0


def _cost(cost: object, count: int) -> float:
    assert callable(cost), "the codec was measured without what it has"
    return float(cost(count))


def _is_fixed(compressor: Compressor, codec: CodecCosts) -> bool:
    """Whether payloads were measured to have the size that the compressor declares as its largest."""
    measured = codec.payload_bytes
    points = measured.points if isinstance(measured, Curve) else [(x, measured(x)) for x in _PROBES]
    return all(abs(compressor.max_encoded_bytes(TensorSpec((int(x),))) - nbytes) < 0.5 for x, nbytes in points)
