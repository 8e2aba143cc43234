"""Warm-up: compile (or load from the cache) every kernel that a plan will need, before the first step needs it.

Compiling takes seconds and keeps the interpreter busy. Done on the way, it would hold up the first step of every other
rank, and a rank whose threads get no turn looks dead to its peers.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from gradwire.core.context import Context
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.sync.plan import PlanEntry

NUM_ELEMENTS = 4096


def warm_up(tensors: Iterable[tuple[PlanEntry, torch.dtype]]) -> None:
    """Take a small tensor through every path of each distinct compressor and element type."""
    seen = set()
    for entry, dtype in tensors:
        key = (repr(entry.compressor), entry.feedback, dtype)
        if key not in seen:
            seen.add(key)
            _warm_up_one(entry, dtype)


def _warm_up_one(entry: PlanEntry, dtype: torch.dtype) -> None:
    compressor, spec = entry.compressor, TensorSpec((NUM_ELEMENTS,), dtype)
    context = Context("warm up", world_size=2, spec=spec)
    grad = torch.linspace(-1, 1, NUM_ELEMENTS).to(dtype)
    work = np.zeros(NUM_ELEMENTS, dtype=np.float32) if entry.feedback == "error" else None
    stats = [stat.values for stat in compressor.stats(grad, context, 0.5)]
    # Twice: the first residual of a tensor is None, the later ones are arrays.
    compressor.encode_compensated(grad, context, work, scale=0.5, stats=stats)
    payload = compressor.encode_compensated(grad, context, work, scale=0.5, residual=work, stats=stats)
    total = torch.empty(NUM_ELEMENTS)
    compressor.decode_sum([payload, payload], [context, context], total, stats)
    kernels.compensate(as_array(grad), 0.5, total.numpy(), total.numpy())
    kernels.cast(total.numpy(), as_array(grad))
    if compressor.summable:
        lanes = np.zeros(compressor.num_lanes(spec), compressor.lane_dtype(2))
        compressor.lift(payload, context, lanes, accumulate=True)
        compressor.lower(lanes, 2, context, stats, total)
        return
    compressor.encode_compensated(total, context, work)
    aggregate = compressor.encode_compensated(total, context, work, residual=work)
    compressor.decode(aggregate, context, grad)
