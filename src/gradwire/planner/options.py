"""The options of a tensor: every way there is for it, with what that takes by the closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gradwire.core.spec import TensorSpec
from gradwire.planner.closed_forms import Route, route
from gradwire.planner.costs import CodecCosts, Costs
from gradwire.planner.fidelity import DENSE, RankedCompressor
from gradwire.sync.fusion import FUSION_STRATEGIES, MAX_FUSED_ELEMENTS


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to plan for.

    Attributes:
        name: parameter name.
        shape: of the parameter.
        dtype: of its gradient.
        ready: seconds from the start of backward until it is handed over, with its bucket.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    ready: float = 0.0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return TensorSpec(self.shape, self.dtype).nbytes

    @property
    def size(self) -> tuple[int, int]:
        """All that a tensor's options depend on."""
        return self.numel, self.dtype.itemsize


def is_small(shape: Sequence[int], min_elements: int) -> bool:
    """Whether a tensor of this shape travels in a batch, with other small ones and uncompressed."""
    return len(shape) <= 1 or math.prod(shape) < min_elements


class Option(NamedTuple):
    """One way for one tensor."""

    spec: str
    strategy: str
    partitions: int
    route: Route


def options(
    tensor: PlannedTensor,
    costs: Costs,
    methods: Sequence[RankedCompressor],
    partitions: Sequence[int],
    neighbors: int = 1,
) -> list[Option]:
    """Every way there is for a tensor, dense ones included, the most faithful first.

    Args:
        tensor: the tensor.
        costs: measured on this job.
        methods: what may be chosen.
        partitions: numbers to try.
        neighbors: how many tensors, itself included, it could share a bundle with.
    """
    found, itemsize = [], tensor.dtype.itemsize
    for method in (DENSE, *(method for method in methods if method.spec != DENSE.spec)):
        for strategy in method.strategies:
            codec = costs.codec(method.spec)
            bundle = neighbors if _travels_in_bundles(method.spec, strategy, codec, tensor.numel) else 1
            for count in [1] if bundle > 1 else _partitions(partitions, strategy, codec):
                way = route(method.spec, strategy, count, tensor.numel, costs, itemsize, bundle)
                found.append(Option(method.spec, strategy, count, way))
    return found


def _travels_in_bundles(spec: str, strategy: str, codec: CodecCosts, numel: int) -> bool:
    """As `gradwire.sync.fusion.is_fused`, by what the costs tell of a compressor."""
    plain = not (spec == DENSE.spec or codec.needs_stats or codec.summable)
    return plain and strategy in FUSION_STRATEGIES and numel <= MAX_FUSED_ELEMENTS


def _partitions(partitions: Sequence[int], strategy: str, codec: CodecCosts) -> list[int]:
    """Numbers to try. Ranks whose encodes wait for a preliminary round all send to one owner at a time, so that more
    ranges make a scatter-reduce slower (8 to 25 % in the simulator).
    """
    return [1] if strategy == "scatter_reduce" and codec.needs_stats else sorted(partitions)


def unbeaten(found: Sequence[Option]) -> list[int]:
    """Those that are the best in some of codec, link and time; of equals the first."""
    loads = [(option.route.encode + option.route.decode, option.route.wire, option.route.seconds) for option in found]
    return [
        pick
        for pick, load in enumerate(loads)
        if not any(other != load and all(a <= b for a, b in zip(other, load)) for other in loads)
        and load not in loads[:pick]
    ]


def best_alone(found: Sequence[Option]) -> Option:
    """The least time for one tensor by itself; the first, most faithful one among equals."""
    return min(found, key=lambda option: option.route.seconds)
