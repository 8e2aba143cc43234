"""The jobs that the synchronizer makes of a backward pass: single tensors and fused small ones.

Guarantees: groups are those of `Synchronizer.submit`, called for one bucket after another as by DDP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from gradwire.compressors.base.registry import make
from gradwire.planner.costs import Costs
from gradwire.planner.options import FIRST_BUCKET_BYTES
from gradwire.simulate.assemble import SimulatedJob
from gradwire.simulate.cluster import Cluster
from gradwire.simulate.graphs import FusionMember
from gradwire.simulate.prices import PriceList
from gradwire.simulate.served import SERVER, ServedPrices
from gradwire.simulate.workload import SimulatedGradient, SimulatedModel
from gradwire.sync.fusion import is_fused, rotations
from gradwire.sync.job import group_name
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry


class _Entry(NamedTuple):
    """A gradient with its plan entry, and who owns its first range."""

    gradient: SimulatedGradient
    entry: PlanEntry
    rotation: int

    @property
    def numel(self) -> int:
        return self.gradient.spec.numel

    @property
    def is_fused(self) -> bool:
        """Whether it joins other compressed tensors of its bucket."""
        return not self.entry.batched and is_fused(self.entry, self.numel)


def jobs_of(model: SimulatedModel, plan: Plan, cluster: Cluster, costs: Costs) -> list[SimulatedJob]:
    """The jobs of one backward pass, in the order of submission."""
    found = [
        (grad, _on_nodes(plan.entry(grad.name, grad.spec), cluster)) for grad in model.gradients if grad.spec.numel
    ]
    owners = rotations((entry, grad.spec.numel) for grad, entry in found)
    entries = [_Entry(grad, entry, rotation) for (grad, entry), rotation in zip(found, owners)]
    jobs: list[SimulatedJob] = []

    def add(group: Sequence[_Entry], ready: float, members: tuple[FusionMember, ...] = ()) -> None:
        first, entry = group[0], group[0].entry
        shape = first.gradient.spec.shape if len(group) == 1 else (sum(each.numel for each in group),)
        name = group_name([each.gradient.name for each in group])
        dtype = first.gradient.dtype
        served = ServedPrices(entry.compressor, dtype, cluster) if entry.strategy == SERVER else None
        prices = PriceList(
            entry.compressor,
            costs,
            dtype,
            fused=bool(members),
            in_place=costs.in_place and entry.adds_in_place,
            served=served,
        )
        rotation = 0 if entry.batched and entry.strategy == "ring" else first.rotation  # as `DenseGroup.of`
        jobs.append(SimulatedJob(name, shape, entry, ready, rotation, prices, members))

    for bucket in _buckets(entries, model.bucket_bytes):
        ready = model.compute.forward_seconds + bucket[-1].gradient.ready_seconds
        groups: dict[object, list[_Entry]] = {}
        for each in bucket:
            entry = each.entry
            if entry.batched or each.is_fused:
                kind = repr(entry.compressor), entry.strategy, entry.feedback, entry.partitions, entry.batched
                groups.setdefault((*kind, each.gradient.dtype), []).append(each)
            else:
                add([each], ready)
        for group in groups.values():
            is_dense = group[0].entry.batched
            members = () if is_dense else tuple(FusionMember(each.gradient.spec.shape, each.rotation) for each in group)
            add(group, ready, members)
    return jobs


def _on_nodes(entry: PlanEntry, cluster: Cluster) -> PlanEntry:
    """The entry as the synchronizer takes it: on a single node, hierarchical entries become dense."""
    if entry.strategy != "hierarchical" or cluster.ranks_per_node < cluster.ranks:
        return entry
    strategy = "scatter_reduce" if entry.batched else "ring"
    return replace(entry, compressor=make("none"), strategy=strategy, feedback="none")


def _buckets(entries: Iterable[_Entry], bucket_bytes: float | None) -> Iterator[list[_Entry]]:
    bucket: list[_Entry] = []
    nbytes, limit = 0, min(FIRST_BUCKET_BYTES, bucket_bytes or 0)
    for each in entries:
        bucket.append(each)
        nbytes += each.gradient.spec.nbytes
        if nbytes >= limit:
            yield bucket
            bucket, nbytes, limit = [], 0, bucket_bytes or 0
    if bucket:
        yield bucket
