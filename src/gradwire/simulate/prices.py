"""What the work of a task graph costs, from measured costs and a compressor's own sizes."""

from __future__ import annotations

import torch

from gradwire.compressors.base import Compressor
from gradwire.compressors.registry import spec_of
from gradwire.core.spec import TensorSpec
from gradwire.simulate.recording import Work
from gradwire.sync.costs import CodecCosts, Costs, Curve
from gradwire.wire.frame import FrameKind

_PROBES = (1 << 12, 1 << 16, 1 << 20)


class PriceList:
    """Prices of one method.

    Args:
        compressor: of the method.
        costs: measured.
        world_size: ranks, which the width of integer lanes depends on.
        dtype: of the gradients.

    Raises:
        UnknownNameError: the method was not measured.
    """

    def __init__(self, compressor: Compressor, costs: Costs, world_size: int, dtype: torch.dtype) -> None:
        self._compressor = compressor
        self._codec = costs.codec(spec_of(compressor))
        self._costs = costs
        self._world_size = world_size
        self._dtype = dtype
        self._is_fixed = _is_fixed(compressor, self._codec)

    def seconds(self, work: Work, count: int) -> float:
        """Of the processor, which takes a moment for every task, whatever that does."""
        if self.carries and work.call in ("send", "recv"):
            return self._carry(work, count)
        priced: float = getattr(self, f"_{work.call}")(work, count)
        return self._costs.task + priced

    @property
    def carries(self) -> bool:
        """Whether frames cost the processor time by their size."""
        return self._costs.frame(1 << 20) > 1.01 * self._costs.frame(0)

    def _carry(self, work: Work, count: int) -> float:
        """A piece of a frame, and the engine's moment for one that came in: one that goes out had it at hand-over."""
        whole = self._costs.frame(self.frame_bytes(work._replace(share=1.0), count))
        return work.share * (whole + (self._costs.task if work.call == "recv" else 0.0))

    def _hand(self, work: Work, count: int) -> float:
        return 0.0

    def frame_bytes(self, work: Work, count: int) -> float:
        """Of a frame, header included, or of a piece of one."""
        spec = TensorSpec((count,), self._dtype)
        if work.dense:
            body: float = spec.nbytes
        elif work.frame is FrameKind.STATS:
            body = 4 * sum(length for length, _ in self._compressor.stats_spec(spec))
        elif work.frame is FrameKind.AGGREGATE:
            body = self._compressor.num_lanes(spec) * self._compressor.lane_dtype(self._world_size).itemsize
        elif self._is_fixed:
            body = self._compressor.max_encoded_bytes(spec)
        else:
            body = min(self._codec.payload_bytes(count), self._compressor.max_encoded_bytes(spec))
        return work.share * (self._costs.frame_bytes + body)

    def _send(self, work: Work, count: int) -> float:
        return self._costs.frame(0)

    def _recv(self, work: Work, count: int) -> float:
        return self._costs.frame(0)

    def _start(self, work: Work, count: int) -> float:
        return self._codec.encode(count)

    def _merge(self, work: Work, count: int) -> float:
        own = self._codec.encode(count)
        if work.frame is FrameKind.AGGREGATE:
            return own + self._sum_lanes(work, count) + _cost(self._codec.lift, count)
        taken = work.num_messages * self._codec.merge(count)
        added = own + self._codec.merge(count) if work.encodes_own else self._costs.add(count)
        return taken + added + self._codec.encode(count)

    def _decode(self, work: Work, count: int) -> float:
        if not self._compressor.summable:
            return self._codec.decode(count)
        return self._sum_lanes(work, count) + _cost(self._codec.lower, count)

    def _decode_sum(self, work: Work, count: int) -> float:
        if not self._compressor.summable:
            return work.num_messages * self._codec.merge(count)
        return self._sum_lanes(work, count) + _cost(self._codec.lower, count)

    def _sum_lanes(self, work: Work, count: int) -> float:
        """Payloads are lifted, lanes that arrive are added as they are."""
        one = self._costs.add(count) if work.taken is FrameKind.AGGREGATE else _cost(self._codec.lift, count)
        return work.num_messages * one

    def _dense(self, work: Work, count: int) -> float:
        return self._costs.codec("none").encode(count)

    def _add_up(self, work: Work, count: int) -> float:
        return self._costs.add(count) + work.num_messages * self._costs.codec("none").merge(count)

    def _spread(self, work: Work, count: int) -> float:
        return self._costs.codec("none").encode(count)

    def _place(self, work: Work, count: int) -> float:
        return self._costs.codec("none").decode(count)

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
