"""One training step of a cluster, simulated: the synchronizer's own graphs, with costs in place of data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from gradwire.compressors.base import Compressor
from gradwire.core.errors import OptionError
from gradwire.planner.costs import Costs
from gradwire.simulate.assemble import Assembled, assemble
from gradwire.simulate.bulk import Bulk, Coordination, coordination
from gradwire.simulate.cluster import Cluster, Compute
from gradwire.simulate.events import simulate
from gradwire.simulate.fold import folded, unfolded
from gradwire.simulate.items import PlanLike, SimulatedGradient, items_of
from gradwire.simulate.models import ModelShape
from gradwire.simulate.reading import Reading, alone
from gradwire.simulate.result import StepResult
from gradwire.sync.plan import Method, Plan

MAX_FULL_RANKS = 16
"""Up to so many ranks all are simulated, unless told otherwise."""


def gradients_of(model: ModelShape, backward_seconds: float) -> list[SimulatedGradient]:
    """The gradients of a model in the order of its backward, spread over its time by the work of its layers."""
    return [
        SimulatedGradient(tensor.name, tensor.shape, share * backward_seconds) for tensor, share in model.backward()
    ]


def step(
    gradients: Sequence[SimulatedGradient],
    plan: PlanLike | Method,
    cluster: Cluster,
    costs: Costs,
    compute: Compute | None = None,
    *,
    strategy: str | None = None,
    partitions: int = 1,
    bucket_bytes: float | None = None,
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
        bucket_bytes: gradients are handed over in buckets of at most so many bytes, as by DDP; None hands over each by
            itself. Small tensors travel together as in the synchronizer.
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
    begin = compute.forward_seconds
    items = items_of(gradients, chosen, cluster, costs, begin, bucket_bytes) if cluster.ranks > 1 else []
    wants_fold = cluster.ranks > MAX_FULL_RANKS and cluster.cores is None if fold is None else fold
    fold_ = folded(cluster) if wants_fold and bulk is None else unfolded(cluster)
    if not items:
        return alone(cluster, fold_, compute)
    assembled = assemble(items, cluster, fold_)
    trail = simulate(
        *(assembled.tasks, assembled.num_processors, assembled.num_channels, assembled.num_groups),
        *(cluster.cores, cluster.wake_seconds),
        None if bulk is None else _coordination(bulk, assembled, cluster, costs),
    )
    return Reading(items, cluster, fold_, compute, assembled, trail).result(trace)


def _coordination(bulk: Bulk, assembled: Assembled, cluster: Cluster, costs: Costs) -> Coordination:
    per_byte = costs.frame(1 << 20) - costs.frame(0)
    if cluster.ranks_per_node > 1 or per_byte > 0.01 * costs.frame(0):
        raise OptionError(
            f"Expected a link a rank and frames that cost the processor the same whatever their size, got "
            f"{cluster.ranks_per_node} ranks a node and {per_byte:g} s for 1 MiB. Do: pass ranks_per_node=1, and "
            "costs whose frame is Line(seconds, 0)."
        )
    return coordination(bulk, assembled.tasks, assembled.nbytes, cluster, costs.frame(0))


def _check_order(gradients: Sequence[SimulatedGradient], compute: Compute) -> None:
    times = [0.0, *(grad.ready_seconds for grad in gradients), compute.backward_seconds]
    late = [(before, after) for before, after in itertools.pairwise(times) if after < before * (1 - 1e-9)]
    if late:
        raise OptionError(
            f"Expected gradients in the order in which they are ready, the last by the end of the backward, got "
            f"{late[0][1]:g} s after {late[0][0]:g} s. Do: sort them, and check backward_seconds."
        )
