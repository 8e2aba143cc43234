"""The options of a tensor: every compressor, strategy and number of partitions, with times by the closed forms."""

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
        name: Name of the parameter.
        shape: Shape of the parameter.
        dtype: Element type of its gradient.
        ready: Seconds from the start of backward until its bucket is handed over.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    ready: float = 0.0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return TensorSpec(self.shape, self.dtype).nbytes

    @property
    def size(self) -> tuple[int, int]:
        """Everything that the options of a tensor depend on."""
        return self.numel, self.dtype.itemsize


def is_small(shape: Sequence[int], min_elements: int) -> bool:
    """Whether a tensor of this shape travels in a batch with other small ones, uncompressed or cast."""
    return len(shape) <= 1 or math.prod(shape) < min_elements


class Option(NamedTuple):
    """One option of a tensor."""

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
    """Return all options of a tensor, dense ones first, in the order of `methods`.

    Args:
        tensor: The tensor.
        costs: Costs of this job.
        methods: Compressors to choose from, the highest fidelity first.
        partitions: Numbers of partitions to try.
        neighbors: Number of tensors, including this one, that it could be fused with.
    """
    found, itemsize = [], tensor.dtype.itemsize
    for method in (DENSE, *(method for method in methods if method.spec != DENSE.spec)):
        for strategy in method.strategies:
            codec = costs.codec(method.spec)
            fused = neighbors if _is_fused(method.spec, strategy, codec, tensor.numel) else 1
            # After a preliminary round all ranks send to one owner at a time: more ranges make a scatter-reduce
            # slower (8 to 25 % in the simulator).
            whole = fused > 1 or (strategy == "scatter_reduce" and codec.needs_stats)
            for count in [1] if whole else sorted(partitions):
                times = route(method.spec, strategy, count, tensor.numel, costs, itemsize, fused)
                found.append(Option(method.spec, strategy, count, times))
    return found


def _is_fused(spec: str, strategy: str, codec: CodecCosts, numel: int) -> bool:
    """Whether `gradwire.sync.fusion` fuses such a tensor, as far as costs tell."""
    plain = not (spec == DENSE.spec or codec.needs_stats or codec.summable)
    return plain and strategy in FUSION_STRATEGIES and numel <= MAX_FUSED_ELEMENTS


def unbeaten(found: Sequence[Option]) -> list[int]:
    """Return the options that no other one beats in codec, link and time together; of equals the first."""
    loads = [(option.route.encode + option.route.decode, option.route.wire, option.route.seconds) for option in found]
    return [
        pick
        for pick, load in enumerate(loads)
        if not any(other != load and all(a <= b for a, b in zip(other, load)) for other in loads)
        and load not in loads[:pick]
    ]


def best_alone(found: Sequence[Option]) -> Option:
    """Return the option of the least time for one tensor alone; among equals the first."""
    return min(found, key=lambda option: option.route.seconds)
