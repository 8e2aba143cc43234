"""The jobs that the synchronizer makes of a backward pass: single tensors and fused small ones.

Guarantees: groups are those of `Synchronizer.submit`, called for one bucket after another as by DDP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from gradwire.compressors.base.registry import make
from gradwire.planner.costs import Costs
from gradwire.simulate.assemble import SimulatedJob
from gradwire.simulate.cluster import Cluster
from gradwire.simulate.prices import PriceList
from gradwire.simulate.recording import FusionMember
from gradwire.simulate.workload import SimulatedGradient, SimulatedModel
from gradwire.sync.dense_fusion import DENSE_FUSION_FLAG, dense_fusion_entry, group_ids
from gradwire.sync.fusion import is_fused
from gradwire.sync.job import group_name
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry


class _Entry(NamedTuple):
    """A gradient with its plan entry, and its number in the order of the backward pass."""

    number: int
    gradient: SimulatedGradient
    entry: PlanEntry

    @property
    def numel(self) -> int:
        return self.gradient.spec.numel

    @property
    def is_fused(self) -> bool:
        """Whether it joins other compressed tensors of its bucket."""
        return not self.entry.batched and is_fused(self.entry, self.numel)


def jobs_of(model: SimulatedModel, plan: Plan, cluster: Cluster, costs: Costs) -> list[SimulatedJob]:
    """The jobs of one backward pass, in the order of submission."""
    entries = [
        _Entry(index, grad, _on_nodes(plan.entry(grad.name, grad.spec), cluster))
        for index, grad in enumerate(model.gradients)
        if grad.spec.numel
    ]
    fusion_index = {each.number: index for index, each in enumerate(each for each in entries if each.is_fused)}
    last_of_group = _dense_groups(entries)
    pending: dict[object, list[_Entry]] = {}
    jobs: list[SimulatedJob] = []

    def add(
        group: Sequence[_Entry], entry: PlanEntry, ready: float, flag: int = 0, members: tuple[FusionMember, ...] = ()
    ) -> None:
        first, numel = group[0], sum(each.numel for each in group)
        name = group_name([each.gradient.name for each in group])
        prices = PriceList(entry.compressor, costs, first.gradient.dtype, fused=bool(members))
        jobs.append(SimulatedJob(name, numel, entry, ready, first.number | flag, prices, members))

    for bucket in _buckets(entries, model.bucket_bytes):
        ready = model.compute.forward_seconds + bucket[-1].gradient.ready_seconds
        fused: dict[object, list[_Entry]] = {}
        complete: list[list[_Entry]] = []
        for each in bucket:
            entry = each.entry
            if entry.batched:
                group, is_last = last_of_group[each.number]
                pending.setdefault(group, []).append(each)
                complete += [pending[group]] if is_last else []
            elif each.is_fused:
                key = repr(entry.compressor), entry.strategy, entry.feedback, each.gradient.dtype
                fused.setdefault(key, []).append(each)
            else:
                add([each], entry, ready)
        for group_ in fused.values():
            members = tuple(FusionMember(each.numel, fusion_index[each.number]) for each in group_)
            add(group_, group_[0].entry, ready, members=members)
        for group_ in complete:
            add(group_, dense_fusion_entry(group_[0].entry), ready, DENSE_FUSION_FLAG)
    return jobs


def _on_nodes(entry: PlanEntry, cluster: Cluster) -> PlanEntry:
    """The entry as the synchronizer takes it: on a single node, hierarchical entries become dense."""
    if entry.strategy != "hierarchical" or cluster.ranks_per_node < cluster.ranks:
        return entry
    strategy = "scatter_reduce" if entry.batched else "ring"
    return replace(entry, compressor=make("none"), strategy=strategy, feedback="none")


def _buckets(entries: Iterable[_Entry], bucket_bytes: float | None) -> Iterator[list[_Entry]]:
    bucket: list[_Entry] = []
    nbytes = 0
    for each in entries:
        if bucket and (bucket_bytes is None or nbytes + each.gradient.spec.nbytes > bucket_bytes):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(each)
        nbytes += each.gradient.spec.nbytes
    if bucket:
        yield bucket


def _dense_groups(entries: Iterable[_Entry]) -> dict[int, tuple[object, bool]]:
    """For each small dense tensor: its fusion group, and whether it completes the group."""
    found = group_ids((str(each.number), each.entry, each.gradient.spec) for each in entries)
    last = {group: name for name, group in found.items()}
    return {int(name): (group, last[group] == name) for name, group in found.items()}
