"""Batches: the dense tensors of a bucket, which travel together (`gradwire.sync.fusion.DenseGroup`).

Small tensors are always in a batch. Larger ones are in the batch of their bucket if the search has left them dense, so
the size of a batch is only known for a whole plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gradwire.planner.closed_forms import Route, route
from gradwire.planner.costs import Costs
from gradwire.planner.options import Option, PlannedTensor, num_shares

STRATEGIES = ("scatter_reduce", "ring", "allgather")  # small tensors prefer few hops, because latency counts


class Batch(NamedTuple):
    """What the tensors of a batch have in common."""

    ready: float
    spec: str
    strategy: str


class Size(NamedTuple):
    """Elements and bytes of tensors together."""

    numel: int = 0
    nbytes: int = 0

    def plus(self, tensor: PlannedTensor) -> Size:
        return Size(self.numel + tensor.numel, self.nbytes + tensor.nbytes)


class Batches:
    """The batches of a model.

    Args:
        costs: Costs of this job.
        small: Tensors that are always batched.
        in_place: Whether dense gradients may be added where they are.
    """

    def __init__(self, costs: Costs, small: Iterable[PlannedTensor], in_place: bool = True) -> None:
        self._costs = costs
        self._in_place = in_place
        self._routes: dict[tuple[str, str, Size], Route] = {}
        self._small: dict[float, Size] = {}  # by the time at which a bucket is ready
        for tensor in small:
            self._small[tensor.ready] = self._small.get(tensor.ready, Size()).plus(tensor)

    def option(self, spec: str, strategy: str, size: Size) -> Option:
        """Return the option of a whole batch: one range for each rank."""
        shares, key = num_shares(strategy, self._costs), (spec, strategy, size)
        if key not in self._routes:
            itemsize = -(-size.nbytes // max(1, size.numel))
            self._routes[key] = route(
                spec, strategy, shares, size.numel, self._costs, itemsize, in_place=self._in_place
            )
        return Option(spec, strategy, shares, self._routes[key], batched=True)

    def options(self, specs: Sequence[str]) -> list[Option]:
        """Return the options of all small tensors together, as if they were one batch."""
        sizes = self._small.values()
        total = Size(sum(size.numel for size in sizes), sum(size.nbytes for size in sizes))
        return [self.option(spec, strategy, total) for spec in specs for strategy in STRATEGIES]

    def sizes(self, small: Option, large: Iterable[tuple[PlannedTensor, Option]]) -> dict[Batch, Size]:
        """Return the size of each batch of a plan: its option of small tensors, and those of the others."""
        found = {Batch(ready, small.spec, small.strategy): size for ready, size in self._small.items()}
        for tensor, option in large:
            if option.batched:
                key = Batch(tensor.ready, option.spec, option.strategy)
                found[key] = found.get(key, Size()).plus(tensor)
        return found
