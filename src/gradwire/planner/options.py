"""The options of a tensor: every compressor, strategy and number of partitions, with times by the closed forms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from gradwire.compressors.base import SummableCompressor
from gradwire.compressors.base.registry import compressor_of, names
from gradwire.core.spec import TensorSpec
from gradwire.planner.closed_forms import Route, route
from gradwire.planner.costs import CodecCosts, Costs, slowest
from gradwire.planner.curves import LinearCost, scaled
from gradwire.planner.fidelity import DENSE, LEVELS, RankedCompressor
from gradwire.sync.chunk import RANGE_ALIGNMENT
from gradwire.sync.fusion import FUSION_STRATEGIES
from gradwire.sync.plan_entry import MAX_PARTITIONS, MAX_RANGE_ELEMENTS
from gradwire.sync.strategies import STRATEGIES

FIRST_BUCKET_BYTES = 1 << 20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Batches of one range per rank that are tried."""
_USUAL = TensorSpec((1 << 20,))  # by which accumulators are scaled
EXACT = {method.spec for method in LEVELS["exact"]}
"""Compressors that are never fused. Of float64, they send every byte."""


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
    def size(self) -> tuple[int, ...]:
        """Everything that the options of a tensor depend on."""
        return self.dtype.itemsize, *self.shape


def buckets_of(tensors: Sequence[PlannedTensor], bucket_bytes: float | None) -> list[list[PlannedTensor]]:
    """Return the tensors in DDP's buckets, each in the order in which gradients are ready.

    DDP fills buckets in this order, until they have `bucket_bytes`; the first one, until it has 1 MiB. If it is None,
    gradients that are ready at the same time are a bucket.
    """
    ordered = sorted(tensors, key=_ready)
    if bucket_bytes is None:
        return [list(bucket) for _, bucket in itertools.groupby(ordered, key=_ready)]
    found: list[list[PlannedTensor]] = [[]]
    nbytes, limit = 0, min(FIRST_BUCKET_BYTES, bucket_bytes)
    for tensor in ordered:
        if found[-1] and nbytes >= limit:
            found.append([])
            nbytes, limit = 0, bucket_bytes
        found[-1].append(tensor)
        nbytes += tensor.nbytes
    return found


def _ready(tensor: PlannedTensor) -> float:
    return tensor.ready


def in_buckets(tensors: Sequence[PlannedTensor], bucket_bytes: float) -> list[PlannedTensor]:
    """Return the tensors with the times at which DDP hands their buckets over: with their last gradients."""
    buckets = buckets_of(tensors, bucket_bytes)
    return [replace(tensor, ready=bucket[-1].ready) for bucket in buckets for tensor in bucket]


class Option(NamedTuple):
    """One option of a tensor.

    Attributes:
        spec: Compressor.
        strategy: Name of the strategy.
        partitions: Number of ranges that the tensor is cut into, or its batch.
        route: Route of the tensor alone, or its part of a route that it shares.
        batched: Whether it travels in a batch, with what else of its bucket has the same compressor and strategy.
    """

    spec: str
    strategy: str
    partitions: int
    route: Route
    batched: bool = False


def num_shares(strategy: str, costs: Costs) -> int:
    """Return the number of ranks that own ranges; 1 if ranges have no owners."""
    return costs.world_size if STRATEGIES[strategy].has_owners else 1


def partition_counts(numel: int, shares: int) -> list[int]:
    """Return the numbers of partitions that are worth trying, from 1 to sixteen for each rank.

    Args:
        numel: Number of elements.
        shares: Number of ranks that own ranges; 1 if ranges have no owners.
    """
    fewer = [1 << power for power in range((shares - 1).bit_length())]
    blocks = max(1, -(-numel // RANGE_ALIGNMENT))  # no range is smaller
    most = min(blocks, MAX_PARTITIONS)
    return sorted({min(count, most) for count in (*fewer, *(shares * batches for batches in BATCHES))})


def options(
    tensor: PlannedTensor,
    costs: Costs,
    methods: Sequence[RankedCompressor],
    partitions: Sequence[int] | None = None,
    neighbors: int = 1,
    in_place: bool = True,
) -> list[Option]:
    """Return all options of a tensor, dense ones first, in the order of `methods`.

    A dense tensor travels in a batch, cut into one range for each rank, or alone in fewer or more ranges.

    Args:
        tensor: The tensor.
        costs: Costs of this job.
        methods: Compressors to choose from, the highest fidelity first.
        partitions: Numbers of partitions to try; None for `partition_counts`.
        neighbors: Number of tensors, this one included, that it is batched with, or fused with if it has one partition.
        in_place: Whether dense gradients may be added where they are.
    """
    found, itemsize, numel = list[Option](), tensor.dtype.itemsize, tensor.numel
    for strategy in DENSE.strategies:
        shares = num_shares(strategy, costs)
        dense = partial(route, DENSE.spec, strategy, costs=costs, itemsize=itemsize, in_place=in_place)
        together = dense(shares, numel * neighbors)
        found.append(Option(DENSE.spec, strategy, shares, together.scaled(1 / neighbors), batched=True))
        counts = partition_counts(numel, shares) if partitions is None else sorted(partitions)
        for count in (count for count in counts if count != shares):
            found.append(Option(DENSE.spec, strategy, count, dense(count, numel)))
    others = [method for method in methods if method.spec != DENSE.spec]
    for method in (method for method in others if itemsize <= 4 or method.spec not in EXACT):
        codec = codec_for(tensor, method.spec, costs)
        for strategy in method.strategies:
            shares = num_shares(strategy, costs)
            # After a preliminary round all ranks send to one owner at a time: more than a range per rank makes a
            # scatter-reduce slower (8 to 25 % in the simulator).
            most = shares if strategy == "scatter_reduce" and codec.needs_stats else math.inf
            can_be_fused = strategy in FUSION_STRATEGIES and method.spec not in EXACT
            is_fused = can_be_fused and numel <= MAX_RANGE_ELEMENTS
            counts = partition_counts(numel, shares) if partitions is None else sorted(partitions)
            for count in [1] if codec.squares else counts:
                if count <= most:
                    times = route(
                        method.spec, strategy, count, numel, costs, itemsize, neighbors if is_fused else 1, codec
                    )
                    found.append(Option(method.spec, strategy, count, times))
    return found


def on_nodes(method: RankedCompressor, costs: Costs) -> RankedCompressor:
    """Return a method with the strategies of its level, and ``"hierarchical"`` where nodes have several ranks."""
    has_nodes = 1 < costs.ranks_per_node < costs.world_size
    return method._replace(strategies=(*method.strategies, "hierarchical")) if has_nodes else method


def codec_for(tensor: PlannedTensor, spec: str, costs: Costs) -> CodecCosts:
    """Return the costs of a compressor for one tensor.

    Compressors of full tensors are measured with squares. Their seconds are taken to depend on the number of elements
    only. Their bytes are those of the tensor's shape, without what the preliminary round has shared.
    """
    codec = costs.codec(spec)
    if not codec.squares:
        return codec
    compressor, shape = compressor_of(spec), TensorSpec(tensor.shape, tensor.dtype)
    shared = 4 * sum(count for count, _ in compressor.stats_spec(shape))
    payload_bytes = LinearCost(compressor.max_encoded_bytes(shape) - shared, 0.0)
    stats_bytes, accumulator_bytes = codec.stats_bytes and LinearCost(shared, 0.0), codec.accumulator_bytes
    if isinstance(compressor, SummableCompressor):
        itemsize = compressor.accumulator_dtype(costs.world_size).itemsize
        accumulator_bytes = LinearCost(itemsize * compressor.accumulator_size(shape), 0.0)
    return replace(codec, payload_bytes=payload_bytes, stats_bytes=stats_bytes, accumulator_bytes=accumulator_bytes)


def for_ranks(costs: Costs, world_size: int) -> Costs:
    """Return the costs of a job of another size. Accumulators become as wide as sums over its ranks need.

    Args:
        costs: Costs, measured with any number of ranks. If ranks have links of their own, the slowest is kept.
        world_size: Number of ranks.
    """
    codecs = {spec: _summing(spec, codec, world_size) for spec, codec in costs.codecs.items()}
    links = costs.links if world_size == costs.world_size else (slowest(costs.links),)
    found = replace(costs, world_size=world_size, links=links, codecs=codecs)
    # The framework's all-reduce within a node says nothing about one between nodes.
    return found if found.is_one_node == costs.is_one_node else replace(found, native=None)


def _summing(spec: str, codec: CodecCosts, world_size: int) -> CodecCosts:
    """Return the costs of a codec with accumulators for `world_size` ranks."""
    if codec.accumulator_bytes is None or spec.partition(":")[0] not in names():
        return codec
    compressor = compressor_of(spec)
    assert isinstance(compressor, SummableCompressor), "it was measured as one"
    nbytes = compressor.accumulator_dtype(world_size).itemsize * compressor.accumulator_size(_USUAL)
    measured = codec.accumulator_bytes(_USUAL.numel) or nbytes
    return replace(codec, accumulator_bytes=scaled(codec.accumulator_bytes, nbytes / measured))


def unbeaten(found: Sequence[Option]) -> list[int]:
    """Return the options that no other one beats in codec, link and time together; of equals the first."""
    routes = [option.route for option in found]
    loads = np.array([(route.encode + route.decode, route.wire, route.seconds) for route in routes])
    no_worse, equal = (loads[:, None] <= loads).all(2), (loads[:, None] == loads).all(2)
    is_beaten, is_repeated = (no_worse & ~equal).any(0), np.triu(equal, 1).any(0)
    picks: list[int] = np.flatnonzero(~is_beaten & ~is_repeated).tolist()
    return picks


def best_alone(found: Sequence[Option]) -> Option:
    """Return the option of the least time for one tensor alone; among equals the first."""
    return min(found, key=lambda option: option.route.seconds)
