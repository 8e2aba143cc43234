"""Stateful compressors: states for the next step, and states that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gradwire.compressors.base import Compressor, StatefulCompressor, SummableCompressor
from gradwire.core.context import Context
from gradwire.core.spec import as_array
from gradwire.testing.cases import bits, context, heavy_tailed, normal, reduced
from gradwire.testing.checks import about, check, expect
from gradwire.wire.payload import Payload


def _is_stateful(codec: Compressor) -> bool:
    return isinstance(codec, StatefulCompressor)


@check(_is_stateful)
def a_state_is_a_row_of_numbers_that_the_next_step_takes(codec: StatefulCompressor) -> None:
    """`next_state` returns float32[n], uint8[n] or None, and encode and decode take it; three steps."""
    grad = heavy_tailed(60 * 50).reshape(60, 50)
    ctx = context(grad, step=1)
    for step in range(1, 4):
        ctx = replace(ctx, step=step)
        with about(f"step {step}"):
            payload = _round_trip(codec, ctx)
            state = codec.next_state(_source(codec, payload, ctx), ctx)
            if state is not None:
                expect(state.ndim == 1, f"expected a state of one dimension, got shape {state.shape}")
                expect(state.dtype in (np.float32, np.uint8), f"expected float32 or uint8, got {state.dtype}")
                ctx = replace(ctx, state=state)


@check(_is_stateful)
def a_state_of_something_else_is_ignored(codec: StatefulCompressor) -> None:
    """A state of another compressor or other options does no harm."""
    grad = normal(60 * 50).reshape(60, 50)
    for state in (np.empty(0, np.float32), np.full(7, 3, np.float32), np.zeros(129, np.uint8), np.zeros(1, np.uint8)):
        with about(f"a state of {state.dtype}[{state.size}]"):
            _round_trip(codec, context(grad, state=state))


def _round_trip(codec: StatefulCompressor, ctx: Context) -> Payload:
    grad = heavy_tailed(60 * 50, seed=ctx.step).reshape(60, 50)
    payload = codec.encode(grad, ctx)
    found = codec.decode(payload, ctx)
    expect(found.isfinite().all(), "a finite gradient decodes to values that are not finite")
    expect(not codec.exact or bits(found) == bits(grad), "exact is declared, but other bits came out")
    return payload


def _source(codec: StatefulCompressor, payload: Payload, ctx: Context) -> Any:
    """Return the argument of `next_state`, for one rank."""
    if codec.state_source == "payload":
        return payload
    grad = heavy_tailed(60 * 50, seed=ctx.step).reshape(60, 50)
    if codec.state_source == "mean":
        return as_array(grad)
    assert isinstance(codec, SummableCompressor), "only these have accumulators"
    assert ctx.spec is not None
    accumulator = np.zeros(codec.accumulator_size(ctx.spec), codec.accumulator_dtype(ctx.world_size))
    codec.accumulate(codec.encode(grad, ctx, reduced(codec, [grad])), ctx, accumulator)
    return accumulator
