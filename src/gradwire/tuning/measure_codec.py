"""Measures what compressors and the engine cost on this machine.

Figures are medians of repeated calls on one thread, after warm-up, in processor time of that thread. Other work on the
machine counts only as far as it takes caches and memory. Gradients are normal random numbers, unless the caller passes
its own, and residuals are those of several encodes, because the payloads of some codecs depend on the values.
"""

# Shapes: N = elements.

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from gradwire.compressors.base import Compressor, SummableCompressor
from gradwire.compressors.base.registry import DENSE_NAME, make
from gradwire.core import host
from gradwire.core.context import Context
from gradwire.core.errors import OptionError, PayloadError
from gradwire.core.events import EventStream
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.kernels import active as kernels
from gradwire.net.transport import Callbacks, Transport
from gradwire.observe.metrics import Metrics
from gradwire.planner.costs import CodecCosts
from gradwire.planner.curves import Curve
from gradwire.residuals import policies
from gradwire.residuals.policies import EncodeInput
from gradwire.residuals.slices import ResidualKey
from gradwire.residuals.transaction import Residuals
from gradwire.sync.batch import codec_of
from gradwire.sync.engine import Engine
from gradwire.sync.job import TensorJob, TensorLayout
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.run import Run
from gradwire.sync.runtime import Runtime
from gradwire.sync.strategies import operations_of
from gradwire.tuning.measure_fusion import measure_shared
from gradwire.tuning.timing import WARM_UPS, Clock, median_seconds, single_thread
from gradwire.wire.frame import Header, seal, unpack

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Elements of the measured tensors: from one block to 64 MB, which no cache holds."""
_NUM_MERGED = 4  # payloads per merge; figures are per payload
_NUM_RUNS = 3  # of the engine


# -- codecs ------------------------------------------------------------------------------------------------------


def measure_codec(
    compressor: Compressor,
    sizes: Sequence[int] = SIZES,
    seconds_budget: float = 2.0,
    *,
    world_size: int = _NUM_MERGED,
    gradient: torch.Tensor | None = None,
    aux: Mapping[str, torch.Tensor] | None = None,
    clock: Clock = time.thread_time,
    feedback: str | None = None,
) -> CodecCosts:
    """Measure encode, decode and merge of a compressor, and its preliminary round and accumulator if it has them.

    What tensors share in a fusion group is measured with the smallest ones.

    Args:
        compressor: The compressor, with its options.
        sizes: Elements of the tensors to measure, at least two numbers. Where the costs of a compressor depend on
            shapes, these are squares of about this size.
        seconds_budget: About how long this may take, without compilation at first use.
        world_size: Number of ranks, on which the width of accumulators depends, and for some compressors the bits.
        gradient: Gradient, float32, that tensors are cut from; repeated if it is too short. None for random numbers,
            which also stand in for a gradient that the compressor cannot send, such as one beyond the range of fp16.
        aux: Values for `Context.aux`. Those as long as `gradient` are cut and repeated with it.
        clock: Clock of the calls. ``time.perf_counter`` includes the time that other ranks take from this core.
        feedback: Residual policy, as `PlanEntry.feedback`. None for the compressor's own.

    Raises:
        OptionError: There are fewer than two different sizes.
    """
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise OptionError(f"Costs are measured at two or more sizes above 0, not {tuple(sizes)}. Pass a small and a "
                          "large one.")  # fmt: skip
    ordered = sorted(set(sizes))
    if feedback is None:
        feedback = "none" if compressor.exact else compressor.default_feedback
    policy, seconds_each = policies.get(feedback), seconds_budget / len(ordered)

    def measure(size: int) -> _Row:
        grad, of_grad = _shaped(_gradient(size, gradient), compressor), _cut(aux or {}, gradient, size)
        return _measure_size(compressor, policy, world_size, grad, of_grad, seconds_each, clock)

    with single_thread():
        try:
            rows = [measure(size) for size in ordered]
        except PayloadError:
            if gradient is None:
                raise
            gradient = aux = None
            rows = [measure(size) for size in ordered]
        spent = {name: Curve.through(ordered, [row.seconds[name] for row in rows]) for name in rows[0].seconds}
        shared = measure_shared(
            PlanEntry(compressor, "allgather", partitions=1, feedback=feedback),
            *(_gradient(ordered[0], gradient), spent, seconds_each),
            world_size=world_size,
            clock=clock,
        )
    nbytes = {name: _exact_curve(ordered, [row.nbytes[name] for row in rows]) for name in rows[0].nbytes}
    costs: dict[str, Any] = {**spent, **nbytes, **shared}
    return CodecCosts(**costs, squares=compressor.requires_full_tensor)


class _Row(NamedTuple):
    """Seconds and bytes at one size."""

    seconds: dict[str, float]
    nbytes: dict[str, float]


def _measure_size(
    compressor: Compressor,
    policy: policies.Policy,
    world_size: int,
    grad: torch.Tensor,
    aux: dict[str, torch.Tensor],
    seconds_budget: float,
    clock: Clock,
) -> _Row:
    spec = TensorSpec.of(grad)
    context = Context("profile", world_size=world_size, spec=spec, aux=aux)
    residuals, key = Residuals(), ResidualKey(context.name, ElementRange(0, grad.numel()), "local")
    source = EncodeInput(compressor, grad, context, residuals, key, 1 / world_size)

    def stats() -> list[np.ndarray]:
        residuals.rollback()  # the same residual again
        return [stat.values for stat in policy.stats(policy.contribution(source))]

    def encode() -> None:
        residuals.rollback()
        policy.encode(policy.contribution(source), shared)

    for _ in range(WARM_UPS):
        shared = stats() if compressor.needs_stats else []
        payload = policy.encode(policy.contribution(source), shared)
        residuals.commit()
    if payload.nonfinite:
        raise PayloadError(f"{compressor!r} cannot send the gradient that it is measured with.")
    out = host.empty(grad.numel())
    payloads, contexts = [payload] * _NUM_MERGED, [context] * _NUM_MERGED
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "encode": (encode, 1),
        "decode": (lambda: compressor.decode(payload, context, out, stats=shared), 1),
        "merge": (lambda: compressor.decode_sum(payloads, contexts, out, shared), _NUM_MERGED),
    }
    nbytes: dict[str, float] = {"payload_bytes": payload.body.nbytes}
    if compressor.needs_stats:
        calls["stats"] = (stats, 1)
        nbytes["stats_bytes"] = 4 * sum(length for length, _ in compressor.stats_spec(spec))
    if isinstance(compressor, SummableCompressor):
        accumulator = np.zeros(compressor.accumulator_size(spec), compressor.accumulator_dtype(world_size))

        def accumulate() -> None:
            accumulator.fill(0)  # it holds the sum of only a few payloads
            compressor.accumulate(payload, context, accumulator)

        calls["accumulate"] = (accumulate, 1)
        calls["finalize"] = (lambda: compressor.finalize(accumulator, world_size, context, shared, out), 1)
        nbytes["accumulator_bytes"] = accumulator.nbytes
    share = seconds_budget / len(calls)
    seconds = {name: median_seconds(call, share, clock) / divisor for name, (call, divisor) in calls.items()}
    return _Row(seconds, nbytes)


def _cut(aux: Mapping[str, torch.Tensor], gradient: torch.Tensor | None, size: int) -> dict[str, torch.Tensor]:
    """Cut `aux` as `_gradient` cuts the gradient."""
    numel = 0 if gradient is None else gradient.numel()
    return {name: _gradient(size, each) if each.numel() == numel else each for name, each in aux.items()}


def _shaped(grad: torch.Tensor, compressor: Compressor) -> torch.Tensor:
    side = math.isqrt(grad.numel())
    return grad[: side * side].view(side, side) if compressor.requires_full_tensor else grad


def _gradient(size: int, given: torch.Tensor | None) -> torch.Tensor:
    if given is None:
        return host.empty(size).normal_(std=1e-2, generator=torch.Generator().manual_seed(0))
    flat = given.detach().reshape(-1).to(torch.float32)
    return flat.repeat(-(-size // flat.numel()))[:size].contiguous()


def _exact_curve(sizes: Sequence[int], nbytes: Sequence[float]) -> Curve:
    # Payloads of random values need not grow with the size. A curve must not fall.
    rising = np.maximum.accumulate(np.asarray(nbytes, dtype=float))
    return Curve(tuple(zip(map(float, sizes), rising.tolist(), strict=True)))


# -- the engine --------------------------------------------------------------------------------------------------


def measure_add(sizes: Sequence[int] = SIZES, seconds_budget: float = 0.3, clock: Clock = time.thread_time) -> Curve:
    """Measure seconds to add a rank's own gradient to a sum, by elements. For `clock`, see `measure_codec`."""
    ordered = sorted(set(sizes))
    found = []
    for size in ordered:
        grad, total = _gradient(size, None).numpy(), np.zeros(size, np.float32)
        call = partial(kernels.compensate, grad, 1 / _NUM_MERGED, total, total)
        found.append(median_seconds(call, seconds_budget / len(ordered), clock))
    return Curve.through(ordered, found)


def measure_task(num_jobs: int = 300) -> float:
    """Measure seconds of the engine itself per task: queues, frames and events.

    Tiny dense tensors travel between two ranks, of which one is an echo.
    """
    runs = [_run_echo(num_jobs) for _ in range(_NUM_RUNS)]
    return float(np.median(runs))


def _run_echo(num_jobs: int) -> float:
    echo, events = _Echo(), EventStream()
    metrics = Metrics(events)
    work: list[float] = []
    events.listen(lambda event: work.append(event.duration) if event.kind in ("encode", "merge", "decode") else None)
    engine = Engine(
        echo,
        admit=lambda header: None,
        events=events,
        stall_timeout=timedelta(seconds=60),
        on_failure=lambda error, state: None,
        threads=1,
    )
    runtime = Runtime(echo, Residuals(), events, seed=0)
    layout = TensorLayout("profile", 0, PlanEntry(make(DENSE_NAME), "allgather"), torch.float32, 1 << 10)
    operations, values = operations_of(layout, 0, 2), host.zeros(layout.count)
    try:
        start = time.perf_counter()
        for index in range(num_jobs):
            codec = codec_of(TensorJob(layout, values, index, 0), runtime)
            engine.run(Run(operations, codec, layout.name, index, index))
        engine.wait_idle()
        return max(0.0, time.perf_counter() - start - sum(work)) / (num_jobs * len(operations.ops))
    finally:
        engine.close()
        metrics.close()


class _Echo(Transport):
    """Returns every frame as if the other of two ranks had sent the same."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.epoch = 0, 2, 0
        self.sent_bytes, self.received_bytes, self.control_bytes = [0, 0], [0, 0], [0, 0]

    def start(self, callbacks: Callbacks) -> None:
        self._deliver = callbacks.deliver

    def send(self, peer: int, header: Header, body: np.ndarray, on_sent: Callable[[], None] | None = None) -> None:
        sealed = unpack(seal(header, body))
        self._deliver(peer, replace(sealed, sender=peer), body)
        if on_sent is not None:
            on_sent()

    def departed(self, peer: int) -> None:
        return None

    def abort(self, reason: str, blame: int | None = None) -> None:
        """Nobody is there to tell."""

    def close(self) -> None:
        """Nothing is open."""
