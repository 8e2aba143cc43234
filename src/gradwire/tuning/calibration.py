"""Calibration: what links, codecs and the engine cost this job, measured by all ranks at once.

Ranks measure together and in wall-clock time, so that what they share (cores, memory, a switch) counts as it does in a
step. Of each figure the slowest rank's counts, because the others wait for it. All ranks get the same figures.
"""

# Shapes: K = numbers

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from gradwire.compressors.base import Compressor
from gradwire.compressors.base.registry import DENSE_NAME, compressor_of
from gradwire.core import torch_private
from gradwire.core.spec import ElementRange
from gradwire.lang.turns import in_turns
from gradwire.planner.costs import SHARED, CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import Cost, Curve, LinearCost
from gradwire.sync.exchange import MAX_NUMBERS
from gradwire.sync.optimizer_view import OptimizerSlices
from gradwire.sync.synchronizer import Synchronizer
from gradwire.tuning.measure_codec import measure_add, measure_codec, measure_task
from gradwire.tuning.measure_link import measure_links
from gradwire.tuning.step_clock import Timing

SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 22)
"""Elements of the measured tensors, up to about the size of the model's largest."""
_SECONDS_PER_CODEC = 0.3
_TASKS = 60


class CalibrationSample(NamedTuple):
    """Gradients to measure codecs with, all float32.

    Attributes:
        grad: Gradients of any tensors.
        own: Gradient of one tensor.
        aux: Values of its parameter and optimizer that belong to `own`; see `compressors.gcomp`.
    """

    grad: torch.Tensor
    own: torch.Tensor | None = None
    aux: Mapping[str, torch.Tensor] = MappingProxyType({})

    def of(self, compressor: Compressor) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the gradient and `aux` for a compressor."""
        if compressor.needs_optimizer and self.own is not None:
            return self.own, self.aux
        return self.grad, {}


def sampled(
    bucket: torch_private.GradBucket,
    names: Sequence[str],
    aux_of: OptimizerSlices | None,
    known: CalibrationSample | None,
) -> CalibrationSample | None:
    """Copy some of a bucket's gradients, and what gcomp needs with those of its largest tensor.

    None if the sample so far is no worse: one with what gcomp needs is better, and of two such the larger one. Or if
    not all are finite, as in the first steps with a GradScaler, before which an optimizer has no state.
    """
    found = bucket.buffer()[: SIZES[-1]]
    name, own = max(zip(names, bucket.gradients(), strict=True), key=lambda pair: pair[1].numel())
    aux = {} if aux_of is None or own.dim() < 2 else aux_of(name, ElementRange(0, own.numel()))
    if (bool(aux), found.numel()) <= ((False, 0) if known is None else (bool(known.aux), known.grad.numel())):
        return None
    if not (found.isfinite().all() and own.isfinite().all()):
        return None
    grad = found.detach().to("cpu", torch.float32, copy=True)
    if not aux:
        return CalibrationSample(grad)
    copied = {key: values.to("cpu", torch.float32, copy=True) for key, values in aux.items()}
    return CalibrationSample(grad, own.detach().reshape(-1).to("cpu", torch.float32, copy=True), copied)


class Calibration:
    """Measures through a synchronizer, between its steps. All ranks make the same calls in the same order.

    Codecs and the engine are measured once for tensors up to the largest one, links at each call.

    Args:
        synchronizer: Synchronizer of the job.
        largest: Elements of the largest tensor.
        feedback: Residual policy of all compressors; None for the own one of each.
    """

    def __init__(self, synchronizer: Synchronizer, largest: int, feedback: str | None = None) -> None:
        self._synchronizer = synchronizer
        self._feedback = feedback
        self._sizes: tuple[int, ...] = ()
        self._codecs: dict[str, CodecCosts] = {}
        self._add: Curve | None = None
        self.cover(largest)
        self._task = 0.0
        self._native: tuple[float, float] | None = None  # seconds per byte of DDP's own all-reduce, and of the link

    def cover(self, largest: int) -> None:
        """Measure codecs again if larger tensors have come, those that were frozen before, for example."""
        sizes = tuple(size for size in SIZES if size <= 2 * largest)
        sizes = sizes if len(sizes) > 1 else SIZES[:2]
        if sizes != self._sizes:
            self._sizes, self._add = sizes, None
            self._codecs.clear()

    def costs(
        self,
        specs: Iterable[str],
        sample: CalibrationSample | None = None,
        say: Callable[[str], None] = lambda text: None,
        native: Timing | None = None,
    ) -> Costs:
        """Measure everything that the planner needs.

        Args:
            specs: Compressors in addition to ``"none"``.
            sample: This rank's gradients, for codecs whose work or bytes depend on values; None for random numbers.
            say: Called with what this rank measures next.
            native: Steps by DDP's own all-reduce in fp32, if any were timed. Its costs are kept for later calls.
        """
        links = measure_links(self._synchronizer)
        missing = [spec for spec in dict.fromkeys([DENSE_NAME, *specs]) if spec not in self._codecs]
        # The ranks of a machine compile at the same time, each another codec, before any of them measures.
        for number, spec in enumerate(in_turns(missing), start=1):
            say(f"compiling codecs, {number} of {len(missing)}: {spec}")
            self._measure(spec, sample, self._sizes[:2], 0.0)
        self.largest(np.zeros(1))
        for number, spec in enumerate(missing, start=1):
            say(f"measuring codecs, {number} of {len(missing)}: {spec}")
            self._codecs[spec] = self._slowest(self._measure(spec, sample, self._sizes, _SECONDS_PER_CODEC))
        if self._add is None:
            self._add = _curve(self._sizes, self.largest(_values(measure_add(self._sizes, 0.1, time.perf_counter))))
            self._task = float(self.largest(np.array([measure_task(_TASKS)]))[0])
        costs = Costs(
            *(self._synchronizer.world_size, links.between, dict(self._codecs)), add=self._add, task=self._task,
            frame_bytes=float(self._synchronizer.prefix_bytes),
            within=links.within,
            ranks_per_node=1 if links.within is None else len(self._synchronizer.nodes[0]),
        )  # fmt: skip
        return replace(costs, native=self._native_hop(costs, native))

    def _measure(self, spec: str, sample: CalibrationSample | None, sizes: Sequence[int], seconds: float) -> CodecCosts:
        compressor = compressor_of(spec)
        gradient, aux = (None, None) if sample is None else sample.of(compressor)
        return measure_codec(
            compressor, sizes, seconds, world_size=self._synchronizer.world_size, gradient=gradient, aux=aux,
            clock=time.perf_counter, feedback=self._feedback,
        )  # fmt: skip

    def _native_hop(self, costs: Costs, timing: Timing | None) -> LinkCosts | None:
        """Costs of a hop of DDP's own all-reduce on the links as they are now."""
        link, share = costs.slowest, costs.crossing(to_all=False)  # of a ring's hops, few leave a node of several ranks
        if timing is not None:  # all that it takes in addition to latency counts per byte
            hops = 2 * (costs.world_size - 1)
            waiting = min(hops * link.latency * len(timing.buckets), timing.busy / 2)
            seconds_per_byte = (timing.busy - waiting) * costs.world_size / (hops * max(1, timing.nbytes))
            self._native = seconds_per_byte, share * link.seconds_per_byte
        if self._native is None:
            return None
        seconds_per_byte, link_then = self._native
        # What it lost to other things than the link (processor, small messages) stays when the link changes.
        link_now = share * link.seconds_per_byte
        now = max(link_now, seconds_per_byte + link_now - link_then)
        return LinkCosts(link.latency, now)

    def largest(self, mine: np.ndarray) -> np.ndarray:
        """Return the largest of all ranks' numbers, position by position: float64[K] to float64[K]."""
        return self.post(mine)()

    def post(self, mine: np.ndarray) -> Callable[[], np.ndarray]:
        """Send this rank's numbers. The returned function waits for the others and returns what `largest` does."""
        parts = [mine[start : start + MAX_NUMBERS] for start in range(0, mine.size, MAX_NUMBERS)]
        futures = [self._synchronizer.exchange(part) for part in parts]

        def answers() -> np.ndarray:
            self._synchronizer.wait()
            return np.concatenate([future.value().max(axis=0) for future in futures])

        return answers

    def _slowest(self, codec: CodecCosts) -> CodecCosts:
        measured = {field.name: getattr(codec, field.name) for field in fields(codec)}
        costs: dict[str, Any] = {
            name: _curve(self._sizes, self.largest(_values(cost)))
            for name, cost in measured.items()
            if isinstance(cost, Cost)
        }
        least = -self.largest(-np.array([measured[name] for name in SHARED]))  # what every rank saves
        costs |= dict(zip(SHARED, least.tolist()))
        return CodecCosts(**costs, squares=codec.squares)


def _values(cost: Cost) -> np.ndarray:
    assert not isinstance(cost, LinearCost), "what is measured is a curve"
    return np.array([y for _, y in cost.points])


def _curve(sizes: Iterable[int], values: np.ndarray) -> Curve:
    return Curve(tuple(zip(map(float, sizes), values.tolist(), strict=True)))
