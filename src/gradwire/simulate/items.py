"""What the synchronizer makes of a backward: items, bundles of small compressed tensors, batches of small dense ones.

Guarantees: the groups are those of `Synchronizer.submit` as DDP calls it, a bucket after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from gradwire.compressors.base.registry import make
from gradwire.core.spec import TensorSpec
from gradwire.planner.costs import Costs
from gradwire.simulate.assemble import SimulatedItem
from gradwire.simulate.cluster import Cluster
from gradwire.simulate.prices import PriceList
from gradwire.simulate.recording import FusionMember
from gradwire.sync.dense_fusion import DENSE_FUSION_FLAG, dense_fusion_entry, group_ids
from gradwire.sync.fusion import is_fused
from gradwire.sync.plan_entry import PlanEntry


@dataclass(frozen=True)
class SimulatedGradient:
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


class _Entry(NamedTuple):
    """A gradient, its number in the order of backward, and how it travels."""

    number: int
    gradient: SimulatedGradient
    entry: PlanEntry

    @property
    def numel(self) -> int:
        return self.gradient.spec.numel

    @property
    def is_bundled(self) -> bool:
        return not self.entry.batched and is_fused(self.entry, self.numel)


def items_of(
    gradients: Sequence[SimulatedGradient],
    plan: PlanLike,
    cluster: Cluster,
    costs: Costs,
    begin_seconds: float = 0.0,
    bucket_bytes: float | None = None,
) -> list[SimulatedItem]:
    """The items of a backward, in the order in which they are submitted.

    Args:
        gradients: in the order in which they are ready.
        plan: how each travels.
        cluster: ranks and nodes.
        costs: measured costs.
        begin_seconds: of the backward, from the beginning of the step.
        bucket_bytes: gradients are handed over in buckets of at most so many bytes, with the last of each; None hands
            over each by itself.
    """
    entries = [_Entry(index, grad, _placed(plan.entry(grad.name, grad.spec), cluster))
               for index, grad in enumerate(gradients) if grad.spec.numel]  # fmt: skip
    places = {each.number: place for place, each in enumerate(each for each in entries if each.is_bundled)}
    maker = _Maker(cluster, costs, places)
    last = _last_of_batches(entries)
    held: dict[object, list[_Entry]] = {}
    items: list[SimulatedItem] = []
    for bucket in _buckets(entries, bucket_bytes):
        ready = begin_seconds + bucket[-1].gradient.ready_seconds
        together: dict[object, list[_Entry]] = {}
        complete: list[list[_Entry]] = []
        for each in bucket:
            if each.entry.batched:
                batch, is_last = last[each.number]
                held.setdefault(batch, []).append(each)
                complete += [held[batch]] if is_last else []
            elif each.is_bundled:
                entry = each.entry
                key = repr(entry.compressor), entry.strategy, entry.feedback, each.gradient.dtype
                together.setdefault(key, []).append(each)
            else:
                items.append(maker.alone(each, ready))
        items += [maker.bundle(group, ready) for group in together.values()]
        items += [maker.batch(group, ready) for group in complete]
    return items


class _Maker(NamedTuple):
    """Makes items of gradients."""

    cluster: Cluster
    costs: Costs
    places: dict[int, int]

    def alone(self, each: _Entry, ready: float) -> SimulatedItem:
        return SimulatedItem(
            each.gradient.name, each.numel, each.entry, ready, each.number, self._prices(each.entry, each)
        )

    def bundle(self, group: Sequence[_Entry], ready: float) -> SimulatedItem:
        first, numel = group[0], sum(each.numel for each in group)
        members = tuple(FusionMember(each.numel, self.places[each.number]) for each in group)
        prices = self._prices(first.entry, first, bundled=True)
        return SimulatedItem(_name(group), numel, first.entry, ready, first.number, prices, members)

    def batch(self, group: Sequence[_Entry], ready: float) -> SimulatedItem:
        first, numel = group[0], sum(each.numel for each in group)
        entry = dense_fusion_entry(first.entry)
        return SimulatedItem(
            _name(group), numel, entry, ready, first.number | DENSE_FUSION_FLAG, self._prices(entry, first)
        )

    def _prices(self, entry: PlanEntry, first: _Entry, bundled: bool = False) -> PriceList:
        return PriceList(entry.compressor, self.costs, first.gradient.dtype, bundled=bundled)


def _name(group: Sequence[_Entry]) -> str:
    first = group[0].gradient.name
    return first if len(group) == 1 else f"{first} and {len(group) - 1} more"


def _placed(entry: PlanEntry, cluster: Cluster) -> PlanEntry:
    """As the synchronizer does: on one node alone a hierarchical entry comes to a dense one."""
    if entry.strategy != "hierarchical" or cluster.ranks_per_node < cluster.ranks:
        return entry
    strategy = "scatter_reduce" if entry.batched else "ring"
    return replace(entry, compressor=make("none"), strategy=strategy, feedback="none")


def _buckets(entries: Iterable[_Entry], bucket_bytes: float | None) -> Iterator[list[_Entry]]:
    held: list[_Entry] = []
    nbytes = 0
    for each in entries:
        if held and (bucket_bytes is None or nbytes + each.gradient.spec.nbytes > bucket_bytes):
            yield held
            held, nbytes = [], 0
        held.append(each)
        nbytes += each.gradient.spec.nbytes
    if held:
        yield held


def _last_of_batches(entries: Iterable[_Entry]) -> dict[int, tuple[object, bool]]:
    """The batch of each small tensor that travels in one, and whether it is the batch's last."""
    found = group_ids((str(each.number), each.entry, each.gradient.spec) for each in entries)
    last = {batch: name for name, batch in found.items()}
    return {int(name): (batch, last[batch] == name) for name, batch in found.items()}
