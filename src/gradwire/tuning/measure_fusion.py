"""Measures what tensors save in a fusion group, where one compiled call is for all of them (`gradwire.sync.batch`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from gradwire.planner.costs import SHARED
from gradwire.planner.curves import Cost
from gradwire.residuals.transaction import Residuals
from gradwire.sync.batch import BatchCodec
from gradwire.sync.fusion import FusionGroup, FusionLayout, can_be_fused
from gradwire.sync.job import TensorLayout
from gradwire.sync.plan_entry import PlanEntry
from gradwire.tuning.timing import WARM_UPS, Clock, median_seconds

_NUM_TENSORS = 16
_NUM_MERGED = 4  # payloads per merge, as in `measure_codec`


def measure_shared(
    entry: PlanEntry,
    grad: torch.Tensor,
    alone: Mapping[str, Cost],
    seconds_budget: float,
    *,
    world_size: int,
    clock: Clock,
) -> dict[str, float]:
    """Measure the fields ``shared_encode``, ``shared_decode`` and ``shared_merge`` of `CodecCosts`.

    Args:
        entry: Plan entry of each tensor of the group.
        grad: Gradient of each tensor of the group, 1-D, float32.
        alone: Seconds of ``"encode"``, ``"decode"`` and ``"merge"`` of a tensor by itself, by elements.
        seconds_budget: About how long this may take.
        world_size: Number of ranks.
        clock: Clock of the calls.

    Returns:
        Seconds by field. All are 0 for a compressor whose tensors are encoded one by one.
    """
    members = [TensorLayout(f"profile{index}", index, entry, grad.dtype, grad.numel()) for index in range(_NUM_TENSORS)]
    layout = FusionLayout(members)
    group = FusionGroup(layout, [grad.clone() for _ in members], [True] * _NUM_TENSORS, 0, 0)
    compiled = BatchCodec.compiled_of(group, Residuals())
    if compiled is None or not can_be_fused(entry):
        return dict.fromkeys(SHARED, 0.0)
    residuals, (chunk,) = Residuals(), layout.chunks(1)
    codec = BatchCodec(group, residuals, 0, max(world_size, _NUM_MERGED), 0, compiled)
    for _ in range(WARM_UPS):
        payload = codec.start(chunk)
        residuals.commit()

    def encode() -> None:
        residuals.rollback()
        codec.start(chunk)

    calls: dict[str, tuple[Callable[[], object], int]] = {
        "encode": (encode, 1),
        "decode": (partial(codec.decode_sum, chunk, [payload]), 1),
        "merge": (partial(codec.decode_sum, chunk, [payload] * _NUM_MERGED), _NUM_MERGED),
    }
    found = {}
    for name, (call, num_payloads) in calls.items():
        fused = median_seconds(call, seconds_budget / len(calls), clock) / (num_payloads * _NUM_TENSORS)
        # Of n fused tensors, each takes `alone` - (1 - 1 / n) `shared`.
        found[f"shared_{name}"] = max(0.0, alone[name](grad.numel()) - fused) / (1 - 1 / _NUM_TENSORS)
    return found
