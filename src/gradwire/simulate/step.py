"""One training step of a cluster, simulated: the synchroniser's own graphs, with costs in place of data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from gradwire.compressors.base import Compressor
from gradwire.compressors.registry import make
from gradwire.core.errors import OptionError
from gradwire.core.spec import TensorSpec
from gradwire.simulate.assemble import Assembled, SimulatedItem, assemble
from gradwire.simulate.bulk import Bulk, Coordination, coordination
from gradwire.simulate.cluster import Cluster, Compute
from gradwire.simulate.events import simulate
from gradwire.simulate.fold import folded, unfolded
from gradwire.simulate.models import Model
from gradwire.simulate.prices import PriceList
from gradwire.simulate.reading import Reading, alone
from gradwire.simulate.result import StepResult
from gradwire.sync.batch import BATCH_FLAG, Kind, batch_entry
from gradwire.sync.costs import Costs
from gradwire.sync.plan import Method, Plan, PlanEntry

MAX_FULL_RANKS = 16
"""Up to so many ranks all are simulated, unless told otherwise."""


@dataclass(frozen=True)
class Gradient:
    """One gradient of a backward.

    Attributes:
        name: of its parameter.
        shape: of it.
        ready_seconds: when it is there, from the beginning of the backward.
        dtype: its element type.
    """

    name: str
    shape: tuple[int, ...]
    ready_seconds: float = 0.0
    dtype: torch.dtype = torch.float32

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, self.dtype)


class PlanLike(Protocol):
    """Whatever knows how each tensor travels, as `Plan` does."""

    def entry(self, name: str, spec: TensorSpec) -> PlanEntry: ...


def gradients_of(model: Model, backward_seconds: float) -> list[Gradient]:
    """The gradients of a model in the order of its backward, spread over its time by the work of its layers."""
    return [Gradient(tensor.name, tensor.shape, share * backward_seconds) for tensor, share in model.backward()]


def step(
    gradients: Sequence[Gradient],
    plan: PlanLike | Method,
    cluster: Cluster,
    costs: Costs,
    compute: Compute | None = None,
    *,
    strategy: str | None = None,
    partitions: int = 1,
    fold: bool | None = None,
    bulk: Bulk | None = None,
    trace: bool = False,
) -> StepResult:
    """Simulate one step.

    Args:
        gradients: in the order in which backward has them ready.
        plan: how each travels, or one method for all.
        cluster: ranks and links.
        costs: measured costs of the methods and of frames.
        compute: times of the model; None for none but the last gradient's.
        strategy: for all, where `plan` is a method; None as in `Plan`.
        partitions: for all, where `plan` is a method.
        fold: whether one rank stands for all that are like it; None folds above `MAX_FULL_RANKS` ranks. See
            `gradwire.simulate.fold` for what that assumes.
        bulk: how messages are batched; None for each as it is ready. Needs all ranks, each with a link of its own.
        trace: whether the result can write a trace.

    Raises:
        OptionError: the plan does not cover a tensor, gradients are not in order, costs of a method are missing, or
            the cluster cannot be folded, or not be coordinated.
    """
    compute = compute or Compute(backward_seconds=max((grad.ready_seconds for grad in gradients), default=0.0))
    _check_order(gradients, compute)
    chosen = Plan(plan, strategy=strategy, partitions=partitions) if isinstance(plan, (str, Compressor)) else plan
    items = _items(gradients, chosen, cluster, costs, compute) if cluster.ranks > 1 else []
    wants_fold = cluster.ranks > MAX_FULL_RANKS and cluster.cores is None if fold is None else fold
    fold_ = folded(cluster) if wants_fold and bulk is None else unfolded(cluster)
    if not items:
        return alone(cluster, fold_, compute)
    assembled = assemble(items, cluster, fold_)
    trail = simulate(
        *(assembled.tasks, assembled.num_processors, assembled.num_channels, assembled.num_groups, cluster.cores),
        None if bulk is None else _coordination(bulk, assembled, cluster, costs),
    )
    return Reading(items, cluster, fold_, compute, assembled, trail).result(trace)


def _placed(entry: PlanEntry, cluster: Cluster) -> PlanEntry:
    """As the synchroniser does: on one node alone a hierarchical entry comes to a dense one."""
    if entry.strategy != "hierarchical" or cluster.ranks_per_node < cluster.ranks:
        return entry
    strategy = "scatter_reduce" if entry.batched else "ring"
    return replace(entry, compressor=make("none"), strategy=strategy, feedback="none")


def _coordination(bulk: Bulk, assembled: Assembled, cluster: Cluster, costs: Costs) -> Coordination:
    per_byte = costs.frame(1 << 20) - costs.frame(0)
    if cluster.ranks_per_node > 1 or per_byte > 0.01 * costs.frame(0):
        raise OptionError(
            f"Expected a link a rank and frames that cost the processor the same whatever their size, got "
            f"{cluster.ranks_per_node} ranks a node and {per_byte:g} s for 1 MiB. Do: pass ranks_per_node=1, and "
            "costs whose frame is Line(seconds, 0)."
        )
    return coordination(bulk, assembled, cluster, costs.frame(0))


def _check_order(gradients: Sequence[Gradient], compute: Compute) -> None:
    times = [0.0, *(grad.ready_seconds for grad in gradients), compute.backward_seconds]
    late = [(before, after) for before, after in itertools.pairwise(times) if after < before * (1 - 1e-9)]
    if late:
        raise OptionError(
            f"Expected gradients in the order in which they are ready, the last by the end of the backward, got "
            f"{late[0][1]:g} s after {late[0][0]:g} s. Do: sort them, and check backward_seconds."
        )


def _items(
    gradients: Sequence[Gradient], plan: PlanLike, cluster: Cluster, costs: Costs, compute: Compute
) -> list[SimulatedItem]:
    """What the synchroniser would make of a backward: an item a tensor, one for all small ones of a kind at its end."""
    items: list[SimulatedItem] = []
    held: dict[Kind, list[tuple[int, Gradient, PlanEntry]]] = {}
    for index, grad in enumerate(gradients):
        entry = _placed(plan.entry(grad.name, grad.spec), cluster)
        if grad.spec.numel == 0:
            continue
        if entry.batched:
            held.setdefault(Kind.of(entry, grad.spec), []).append((index, grad, entry))
            continue
        prices = PriceList(entry.compressor, costs, cluster.ranks, grad.dtype)
        ready = compute.forward_seconds + grad.ready_seconds
        items.append(SimulatedItem(grad.name, grad.spec.numel, entry, ready, index, prices))
    for kind, batch in held.items():
        (index, first, entry), numel = batch[0], sum(grad.spec.numel for _, grad, _ in batch)
        together = batch_entry(entry)
        prices = PriceList(together.compressor, costs, cluster.ranks, kind.dtype)
        ready = compute.forward_seconds + compute.backward_seconds
        name = first.name if len(batch) == 1 else f"{first.name} and {len(batch) - 1} more"
        items.append(SimulatedItem(name, numel, together, ready, index | BATCH_FLAG, prices))
    return items
