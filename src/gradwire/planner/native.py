"""The framework's own all-reduce, which plans are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.core.errors import UnknownNameError
from gradwire.planner.closed_forms import native_seconds
from gradwire.planner.costs import Costs
from gradwire.planner.options import PlannedTensor
from gradwire.planner.schedule import Schedule

_ITEMSIZES = {"fp32": 8, "fp16": 2}  # most bytes of an element, by kind


def natives(
    tensors: Sequence[PlannedTensor], costs: Costs, bucket_bytes: int, kinds: Sequence[str]
) -> dict[str, Schedule]:
    """Schedule each kind of the framework's own all-reduce.

    Raises:
        UnknownNameError: A kind does not exist.
    """
    unknown = set(kinds) - set(_ITEMSIZES)
    if unknown:
        raise UnknownNameError("kind of all-reduce", min(unknown), _ITEMSIZES)
    return {kind: _native(tensors, costs, bucket_bytes, _ITEMSIZES[kind]) for kind in kinds}


def _native(tensors: Sequence[PlannedTensor], costs: Costs, bucket_bytes: int, itemsize: int) -> Schedule:
    """Schedule the framework's own all-reduce: one bucket after another, each once its last gradient is ready."""
    finish, busy, nbytes, sent = 0.0, 0.0, 0, 0
    waiting = 2 * (costs.world_size - 1) * (costs.native or costs.slowest).latency
    for index, tensor in enumerate(tensors):
        nbytes += tensor.nbytes
        sent += tensor.numel * min(itemsize, tensor.dtype.itemsize)
        if nbytes >= bucket_bytes or index == len(tensors) - 1:
            seconds = native_seconds(sent, costs)
            finish, busy, nbytes, sent = max(finish, tensor.ready) + seconds, busy + max(0.0, seconds - waiting), 0, 0
    return Schedule(finish, 0.0, busy)
