"""The framework's own all-reduce, which plans are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.core.errors import UnknownNameError
from gradwire.planner.closed_forms import native_seconds
from gradwire.planner.costs import Costs
from gradwire.planner.options import PlannedTensor
from gradwire.planner.schedule import Schedule

_ITEMSIZES = {"fp32": 8, "fp16": 2}  # most bytes of an element, by kind


def natives(buckets: Sequence[Sequence[PlannedTensor]], costs: Costs, kinds: Sequence[str]) -> dict[str, Schedule]:
    """Schedule each kind of the framework's own all-reduce of the buckets that `options.buckets_of` returns.

    Raises:
        UnknownNameError: A kind does not exist.
    """
    unknown = set(kinds) - set(_ITEMSIZES)
    if unknown:
        raise UnknownNameError("kind of all-reduce", min(unknown), _ITEMSIZES)
    return {kind: _native(buckets, costs, _ITEMSIZES[kind]) for kind in kinds}


def _native(buckets: Sequence[Sequence[PlannedTensor]], costs: Costs, itemsize: int) -> Schedule:
    """Schedule the framework's own all-reduce: one bucket after another, each once its last gradient is ready."""
    finish = busy = 0.0
    waiting = 2 * (costs.world_size - 1) * (costs.native or costs.slowest).latency
    for bucket in buckets:
        seconds = native_seconds(sum(each.numel * min(itemsize, each.dtype.itemsize) for each in bucket), costs)
        finish, busy = max(finish, bucket[-1].ready) + seconds, busy + max(0.0, seconds - waiting)
    return Schedule(finish, 0.0, busy)
