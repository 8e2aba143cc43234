"""The survey: what links, codecs and engine cost this job, measured by all ranks at once and the same on each.

Ranks measure together, on the clock on the wall, so that what they share (cores, memory, a switch) counts as it does in
a step. Of each figure the slowest rank's stands, for it is that rank that the others wait for.
"""

# Shapes: W = ranks.

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from gradwire.compressors.base import Compressor
from gradwire.compressors.base.registry import DENSE_NAME, compressor_of
from gradwire.lang.turns import in_turns
from gradwire.planner.costs import CodecCosts, Cost, Costs, Curve, LinearCost
from gradwire.sync.exchange import MAX_NUMBERS
from gradwire.sync.synchronizer import Synchronizer
from gradwire.tuning.measure_codec import measure_add, measure_codec, measure_task
from gradwire.tuning.measure_link import measure_links

SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 22)
"""Elements of the tensors that are measured, as far as the model has such large ones."""
_SECONDS_A_CODEC = 0.3
_TASKS = 60


class CalibrationSample(NamedTuple):
    """Gradients that codecs are measured with, all float32.

    Attributes:
        grad: of any tensors.
        own: of one tensor.
        aux: what belongs to `own` of its parameter and optimizer; see `compressors.gcomp`.
    """

    grad: torch.Tensor
    own: torch.Tensor | None = None
    aux: Mapping[str, torch.Tensor] = MappingProxyType({})

    def of(self, compressor: Compressor) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """What a compressor is measured with."""
        if compressor.needs_optimizer and self.own is not None:
            return self.own, self.aux
        return self.grad, {}


class Calibration:
    """Measures through a synchronizer, between its steps. All ranks make the same calls in the same order.

    Codecs and engine are measured once, links each time.
    """

    def __init__(self, synchronizer: Synchronizer, largest: int) -> None:
        """
        Args:
            synchronizer: of the job.
            largest: elements of the largest tensor.
        """
        self._synchronizer = synchronizer
        self._sizes = tuple(size for size in SIZES if size <= 2 * largest) or SIZES[:2]
        self._sizes = self._sizes if len(self._sizes) > 1 else SIZES[:2]
        self._codecs: dict[str, CodecCosts] = {}
        self._add: Curve | None = None
        self._task = 0.0

    def costs(
        self,
        specs: Iterable[str],
        sample: CalibrationSample | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> Costs:
        """Everything the planner needs, but for the framework's own all-reduce.

        Args:
            specs: compressors beside ``"none"``.
            sample: of this rank, for codecs whose work or bytes depend on values; None for random numbers.
            say: is told what this rank begins with.
        """
        links = measure_links(self._synchronizer)
        missing = [spec for spec in dict.fromkeys([DENSE_NAME, *specs]) if spec not in self._codecs]
        # Ranks of a machine compile side by side, each something else, before any of them looks at a clock.
        for number, spec in enumerate(in_turns(missing), start=1):
            say(f"compiling codecs, {number} of {len(missing)}: {spec}")
            self._measure(spec, sample, self._sizes[:2], 0.0)
        self.largest(np.zeros(1))
        for number, spec in enumerate(missing, start=1):
            say(f"measuring codecs, {number} of {len(missing)}: {spec}")
            self._codecs[spec] = self._slowest(self._measure(spec, sample, self._sizes, _SECONDS_A_CODEC))
        if self._add is None:
            self._add = _curve(self._sizes, self.largest(_values(measure_add(self._sizes, 0.1))))
            self._task = float(self.largest(np.array([measure_task(_TASKS)]))[0])
        return Costs(self._synchronizer.world_size, links, dict(self._codecs), add=self._add, task=self._task)

    def _measure(self, spec: str, sample: CalibrationSample | None, sizes: Sequence[int], seconds: float) -> CodecCosts:
        compressor = compressor_of(spec)
        gradient, aux = (None, None) if sample is None else sample.of(compressor)
        return measure_codec(
            compressor, sizes, seconds, world_size=self._synchronizer.world_size, gradient=gradient, aux=aux,
            clock=time.perf_counter,
        )  # fmt: skip

    def largest(self, mine: np.ndarray) -> np.ndarray:
        """The largest of all ranks' numbers, place by place: float64[K] to float64[K]."""
        return self.post(mine)()

    def post(self, mine: np.ndarray) -> Callable[[], np.ndarray]:
        """Send this rank's numbers; what is returned waits for those of the others, and gives what `largest` gives."""
        parts = [mine[start : start + MAX_NUMBERS] for start in range(0, mine.size, MAX_NUMBERS)]
        futures = [self._synchronizer.exchange(part) for part in parts]
        return lambda: np.concatenate([future.wait().max(axis=0) for future in futures])

    def _slowest(self, codec: CodecCosts) -> CodecCosts:
        measured = {field.name: getattr(codec, field.name) for field in fields(codec)}
        costs: dict[str, Cost] = {
            name: _curve(self._sizes, self.largest(_values(cost)))
            for name, cost in measured.items()
            if cost is not None
        }
        return CodecCosts(**costs)


def _values(cost: Cost) -> np.ndarray:
    assert not isinstance(cost, LinearCost), "what is measured is a curve"
    return np.array([y for _, y in cost.points])


def _curve(sizes: Iterable[int], values: np.ndarray) -> Curve:
    return Curve(tuple(zip(map(float, sizes), values.tolist(), strict=True)))
