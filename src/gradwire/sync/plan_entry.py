"""The plan entry: how one tensor travels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.compressors.base import Compressor, SummableCompressor
from gradwire.sync.chunk import RANGE_ALIGNMENT, Chunk, split

MAX_RANGE_ELEMENTS = 1 << 24  # so that several threads can work on a larger share
MIN_ELEMENTS = 1_024
IN_PLACE = ("ring", "scatter_reduce")  # strategies in which dense gradients are added where they are
MIN_KEPT = 16  # elements of a tensor that a sparsifier sends; with 2, a ResNet lost 4 points (docs/sparsification.md)
MAX_PARTITIONS = 1 << 16  # of a tensor; each costs a task and a frame, and the planner takes 16 for each rank at most


def min_elements_of(compressor: Compressor) -> int:
    """Return the size below which tensors stay dense by default.

    It is 1,024 elements, and more for a sparsifier with a `ratio`, which must keep at least 16 of them.
    """
    ratio = compressor.options.get("ratio") if compressor.sparse else None
    return MIN_ELEMENTS if ratio is None else max(MIN_ELEMENTS, math.ceil(MIN_KEPT / ratio))


def is_small(shape: Sequence[int], min_elements: int) -> bool:
    """Whether a tensor of this shape stays dense: a vector, or of fewer elements."""
    return len(shape) <= 1 or math.prod(shape) < min_elements


@dataclass(frozen=True)
class PlanEntry:
    """How one tensor travels.

    Attributes:
        compressor: Compressor of the tensor.
        strategy: Name of the strategy.
        partitions: Number of ranges that the tensor is cut into, by itself or as part of a dense group. A tensor with
            one range can be fused (`gradwire.sync.fusion`). None means one range per rank, for every 16 million
            elements; in an all-gather, one range for every 16 million.
        feedback: Residual policy as text: ``"none"``, ``"error"`` or ``"momentum"``, the last with options.
        batched: If true, the tensor travels exactly or cast to 16 bits, in a dense group with others.
    """

    compressor: Compressor
    strategy: str = "scatter_reduce"
    partitions: int | None = None
    feedback: str = "none"
    batched: bool = False

    @property
    def adds_in_place(self) -> bool:
        """Whether gradients are neither encoded nor decoded (`gradwire.sync.adding_codecs.DenseCodec`)."""
        return self.compressor.dense and self.feedback == "none" and self.strategy in IN_PLACE

    def num_ranges(self, count: int, shares: int) -> int:
        """Number of ranges that `count` elements are cut into. One if full tensors are required.

        Args:
            count: Number of elements.
            shares: Number of ranks that own ranges; 1 if ranges have no owners.
        """
        if self.compressor.requires_full_tensor:
            return 1
        if self.partitions is not None:
            return self.partitions
        return shares * max(1, -(-count // MAX_RANGE_ELEMENTS))

    @property
    def range_alignment(self) -> int:
        """Elements of whose multiples ranges begin."""
        return max(RANGE_ALIGNMENT, self.compressor.range_alignment)

    def chunks(self, count: int, shares: int) -> list[Chunk]:
        """Cut `count` elements; see `num_ranges`. Some ranges may be empty."""
        return split(count, self.num_ranges(count, shares), self.range_alignment)

    def accumulator_dtype(self, stage: int, world_size: int) -> np.dtype:
        """Element type of the accumulators that leave a stage. On a ring it widens: each hop adds a payload."""
        assert isinstance(self.compressor, SummableCompressor)
        num_payloads = min(stage + 1, world_size) if self.strategy == "ring" else world_size
        return self.compressor.accumulator_dtype(world_size, num_payloads)

    def describe(self, world_size: int) -> dict[str, Any]:
        """What all ranks must agree on, as plain data."""
        return {
            "compressor": self.compressor.name,
            "options": {key: repr(value) for key, value in sorted(self.compressor.options.items())},
            "derived_config": self.compressor.derived_config(world_size),
            "strategy": self.strategy,
            "partitions": self.partitions,
            "feedback": self.feedback,
            "batched": self.batched,
        }
