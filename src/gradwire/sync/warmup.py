"""Warm-up: compile every kernel that a plan needs, or load it from the cache, before the first step.

Compiling takes seconds and keeps the interpreter busy. During the first step it would hold up all other ranks, and a
rank whose threads cannot run looks dead to its peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from gradwire.compressors.base import StatefulCompressor, SummableCompressor
from gradwire.compressors.base.registry import DENSE_NAME, make
from gradwire.core import host
from gradwire.core.context import Context
from gradwire.core.spec import ElementRange, TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.residuals import policies
from gradwire.residuals.policies import EncodeInput
from gradwire.residuals.slices import ResidualKey, Role
from gradwire.residuals.transaction import Residuals
from gradwire.sync.batch import BatchCodec
from gradwire.sync.chunk import Chunk
from gradwire.sync.fusion import FusionGroup, FusionLayout, is_fused
from gradwire.sync.job import TensorJob, TensorLayout
from gradwire.sync.low_rank_codec import LowRankCodec
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.sparse_codec import SparseCodec
from gradwire.sync.strategies import STRATEGIES

NUM_ELEMENTS = 4608  # whole blocks of 1,024, and a part of one: some codecs have a kernel for each

_SHAPE = 64, NUM_ELEMENTS // 64


def warm_up(tensors: Iterable[tuple[PlanEntry, torch.dtype]], world_size: int = 2) -> None:
    """Synchronize a small tensor with each distinct compressor, strategy and element type, on every path."""
    seen = set()
    pairs = list(tensors)
    # Within a node, tensors travel dense. Between nodes, float32 sums are encoded.
    dense = PlanEntry(make(DENSE_NAME))
    for entry, dtype in [pair for pair in pairs if pair[0].strategy == "hierarchical"]:
        pairs += [(dense, dtype), (dense, torch.float32), (entry, torch.float32)]
    for entry, dtype in pairs:
        fused = is_fused(entry, NUM_ELEMENTS)
        key = (repr(entry.compressor), entry.strategy, entry.feedback, dtype, fused)
        if key not in seen:
            seen.add(key)
            _warm_up_one(entry, dtype, world_size)
            if entry.strategy == "sparse_reduce":
                _warm_up_sums(entry, dtype)
            elif fused:
                _warm_up_group(entry, dtype, world_size)


def _aux(spec: TensorSpec) -> dict[str, torch.Tensor]:
    """Return `Context.aux` as from an optimizer with two moments."""
    moments = {name: host.ones(spec.shape, spec.dtype) for name in ("parameter", "first", "second")}
    return moments | {"numbers": host.ones(8), "loss_scale": host.tensor(1.0), "common": host.tensor(True, torch.bool)}


def _warm_up_one(entry: PlanEntry, dtype: torch.dtype, world_size: int) -> None:
    compressor = entry.compressor
    shape = _SHAPE if compressor.requires_full_tensor else (NUM_ELEMENTS,)
    spec = TensorSpec(shape, dtype)
    aux = _aux(spec) if compressor.needs_optimizer else {}
    context = Context("warm up", world_size=world_size, spec=spec, aux=aux)
    policy, residuals = policies.get(entry.feedback), Residuals()
    grad = host.ramp(NUM_ELEMENTS).to(dtype)
    if isinstance(compressor, StatefulCompressor) and compressor.state_source == "mean":
        compressor.next_state(as_array(grad), replace(context, step=1))

    def source(grad: torch.Tensor, role: Role, scale: float) -> EncodeInput:
        key = ResidualKey(role, ElementRange(0, NUM_ELEMENTS), role)
        return EncodeInput(compressor, grad, context, residuals, key, scale)

    if compressor.needs_optimizer:  # where ranks do not rely on what they have in common
        other = replace(context, aux={**aux, "common": host.tensor(False, torch.bool)})
        compressor.decode(compressor.encode(grad, other, scale=0.5), other)

    own, total = source(grad, "local", 0.5), host.empty(NUM_ELEMENTS)
    stats: Sequence[np.ndarray] = [stat.values for stat in compressor.stats(grad, context, 0.5)]
    for _ in range(2):  # the first residual of a tensor is None, the later ones are arrays
        if compressor.needs_stats:
            stats = compressor.finish_stats([stat.values for stat in policy.stats(own)], spec)
        payload = policy.encode(own, stats)
        residuals.commit()
    compressor.decode_sum([payload, payload], [context, context], total, stats)
    kernels.compensate(as_array(grad), 0.5, total.numpy(), total.numpy())
    kernels.cast(total.numpy(), as_array(grad))
    kernels.count_nonfinite(as_array(grad))  # a mean that overflows
    if entry.adds_in_place:
        kernels.weighted_sum([as_array(grad), as_array(grad)], [0.5, 0.5], as_array(grad))
    if isinstance(compressor, SummableCompressor):
        for dtype_of_sum in {entry.accumulator_dtype(stage, world_size) for stage in range(1, world_size)}:
            accumulator = np.zeros(compressor.accumulator_size(spec), dtype_of_sum)
            compressor.accumulate(payload, context, accumulator)
            compressor.finalize(accumulator, world_size, context, stats, total)
        if STRATEGIES[entry.strategy].address is not None:
            kernels.abs_max(as_array(grad))
        return
    for _ in range(2):
        aggregate = policy.encode(source(total, "aggregate", 1.0))
        residuals.commit()
    compressor.decode(aggregate, context, grad)


def _warm_up_sums(entry: PlanEntry, dtype: torch.dtype) -> None:
    layout = TensorLayout("warm up", 0, entry, dtype, NUM_ELEMENTS)
    codec = SparseCodec(TensorJob(layout, host.ramp(NUM_ELEMENTS).to(dtype), 0, 0), Residuals(), 0, 2, 0)
    chunk = Chunk(0, 0, NUM_ELEMENTS)
    mine = codec.start(chunk)
    received, sent = (replace(codec.part(chunk, [mine], distance), sender=1) for distance in range(2))
    codec.decode_sums(chunk, [codec.sum_parts(chunk, [mine, received], 1), sent], 1)


def _warm_up_group(entry: PlanEntry, dtype: torch.dtype, world_size: int) -> None:
    members = [TensorLayout(name, index, entry, dtype, NUM_ELEMENTS, shape=_SHAPE) for index, name in enumerate("ab")]
    values = [host.ramp(NUM_ELEMENTS).to(dtype) for _ in members]
    group = FusionGroup(FusionLayout(members), values, [True] * len(members), 0, 0)
    compiled = BatchCodec.compiled_of(group, Residuals())
    if compiled is not None:
        codec = BatchCodec(group, Residuals(), 0, world_size, 0, compiled)
        (chunk,) = group.layout.chunks(1)
        codec.decode(chunk, [codec.merge(chunk, [codec.start(chunk)], 1)], 1)
    elif LowRankCodec.suits(group):
        low_rank = LowRankCodec(group, Residuals(), 0, world_size, 0)
        (chunk,) = group.layout.chunks(1)
        low_rank.reduce_stats(chunk, [low_rank.stats(chunk)])
        low_rank.decode(chunk, [low_rank.encode_and_merge(chunk, [], 1)], 1)
