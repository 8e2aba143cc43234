"""One simulated training step: the synchronizer's own operations, with costs in place of data."""

from __future__ import annotations

from gradwire.core.errors import OptionError
from gradwire.planner.costs import Costs
from gradwire.simulate.assemble import Assembled, assemble
from gradwire.simulate.bulk import Bulk, Coordination, coordination, unbatched
from gradwire.simulate.cluster import Cluster
from gradwire.simulate.events import simulate
from gradwire.simulate.fold import folded, unfolded
from gradwire.simulate.jobs import jobs_of
from gradwire.simulate.result import StepResult, result_of, result_without_jobs
from gradwire.simulate.workload import SimulatedModel
from gradwire.sync.plan import Method, Plan

MAX_FULL_RANKS = 16
"""Largest number of ranks that `step` simulates one by one by default."""


def step(
    model: SimulatedModel,
    plan: Plan | Method,
    cluster: Cluster,
    costs: Costs,
    *,
    fold: bool | None = None,
    bulk: Bulk | None = None,
) -> StepResult:
    """Simulate one step.

    Args:
        model: Gradients and compute times.
        plan: Plan entry of each gradient, or one method for all.
        cluster: Ranks and links.
        costs: Measured costs of the methods, tasks and frames.
        fold: If true, one rank stands for all ranks that are like it; `gradwire.simulate.fold` says what that assumes.
            None folds above `MAX_FULL_RANKS` ranks. With `bulk`, a queue that loses or tensors that travel through a
            server, nothing is folded.
        bulk: Batching of messages; None sends each message when it is ready. Needs every rank simulated, one per node.

    Raises:
        OptionError: The plan does not cover a gradient, the costs of a method are missing, the cluster cannot be
            folded or coordinated, or it lacks the server that the plan needs.
    """
    chosen = plan if isinstance(plan, Plan) else Plan(plan)
    jobs = jobs_of(model, chosen, cluster, costs) if cluster.ranks > 1 else []
    served = any(job.prices.served for job in jobs)
    wants_fold = cluster.ranks > MAX_FULL_RANKS and cluster.cores is None if fold is None else fold
    plain = bulk is None and cluster.link.queue_bytes is None
    if served and (fold or not plain):
        raise OptionError(
            'Tensors that travel through a server (strategy="server") can be neither folded nor batched, and their '
            "packets are not lost. Leave fold and bulk out, with queue_bytes=None."
        )
    simulated = folded(cluster) if wants_fold and plain and not served else unfolded(cluster)
    if not jobs:
        return result_without_jobs(cluster, simulated, model.compute)
    assembled = assemble(jobs, cluster, simulated)
    batching = unbatched() if plain else _coordination(bulk, assembled, cluster, costs)
    trail = simulate(assembled, cluster, batching)
    return result_of(jobs, cluster, simulated, model.compute, assembled, trail)


def _coordination(bulk: Bulk | None, assembled: Assembled, cluster: Cluster, costs: Costs) -> Coordination:
    if cluster.ranks_per_node > 1 and bulk is None:
        raise OptionError(
            f"A queue that loses cannot be simulated with {cluster.ranks_per_node} ranks per node. Pass "
            "ranks_per_node=1, or queue_bytes=None."
        )
    per_byte = costs.frame(1 << 20) - costs.frame(0)
    if bulk is not None and (cluster.ranks_per_node > 1 or per_byte > 0.01 * costs.frame(0)):
        raise OptionError(
            f"Batches cannot be simulated with {cluster.ranks_per_node} ranks per node and {per_byte:g} s of processor "
            "time for a frame of 1 MiB. Pass ranks_per_node=1 and costs whose frame is LinearCost(seconds, 0)."
        )
    return coordination(bulk, assembled.tasks, assembled.nbytes, cluster, costs.frame(0))
