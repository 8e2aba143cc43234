"""Which ranks are simulated, and where their messages come from.

In full, every rank is. Folded, one node stands for all that are like it (one rank, where nodes have one): strategies
treat all ranks alike but for their numbers, so what a rank receives from the one d places before it leaves there when
its own message for the rank d places behind it does. That makes a step of W ranks cost what one rank's graphs cost.

Folding assumes that
 - a graph of rank r + M is that of rank r with all ranks, and perhaps all parts, counted M further; this is checked;
 - all parts of an item are equal. Real parts are cut at multiples of 1,024 elements, so some are larger than others
   and, with more ranks than blocks, most are empty. A simulated part takes as long as the largest real one, and keeps
   the processor and the network from others for the mean over all parts, empty ones included. So the time that one
   part needs and the load of a rank are right; which rank has more of it at which moment is not looked at;
 - each kind of node hears directly from each other kind. In a ring what a straggler does reaches others only hop by
   hop, so a ring with stragglers is simulated in full, or not at all.
"""

# Shapes: W = ranks, M = ranks of a node, P = parts of an item.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gradwire.core.errors import GradwireError, OptionError
from gradwire.simulate.cluster import Cluster
from gradwire.simulate.loop import RECV, SEND
from gradwire.simulate.recording import RecordedGraph

PartShift = Callable[[int, int, int], int]
"""Which part a shift by so many ranks takes a part to, among P."""

_PART_SHIFTS: tuple[PartShift, ...] = (
    lambda part, shift, num_parts: part,  # every rank begins with the same part
    lambda part, shift, num_parts: (part + shift) % num_parts,  # each with a part of its own
)


class Fold(NamedTuple):
    """The ranks that are simulated.

    Attributes:
        ranks: their numbers.
        stands_for: how many ranks each stands for, itself included.
        place_of: for every rank of the cluster, the place in `ranks` of the one that stands for it (W).
        folded: whether one stands for many.
        ranks_per_node: ranks that are simulated together (M).
    """

    ranks: list[int]
    stands_for: list[int]
    place_of: np.ndarray
    folded: bool
    ranks_per_node: int


def unfolded(cluster: Cluster) -> Fold:
    """All ranks, each for itself."""
    return Fold(
        list(range(cluster.ranks)), [1] * cluster.ranks, np.arange(cluster.ranks), False, cluster.ranks_per_node
    )


def folded(cluster: Cluster) -> Fold:
    """The ranks of one node of each kind.

    Raises:
        OptionError: ranks share cores, so that none can stand for others.
    """
    if cluster.cores is not None:
        raise OptionError(
            f"Expected a processor a rank in a folded simulation, got {cluster.cores} cores for all ranks. Do: pass "
            "fold=False, or cores=None."
        )
    size = cluster.ranks_per_node
    nodes: dict[tuple[object, ...], int] = {}  # the first node of each kind, with its place
    ranks: list[int] = []
    stands_for: list[int] = []
    place_of = np.empty(cluster.ranks, np.int64)
    for node in range(cluster.ranks // size):
        members = cluster.members(node)
        kind = tuple(cluster.straggler(rank) for rank in members)
        if kind not in nodes:
            nodes[kind] = len(ranks)
            ranks.extend(members)
            stands_for.extend([0] * size)
        first = nodes[kind]
        place_of[members.start : members.stop] = range(first, first + size)
        for place in range(first, first + size):
            stands_for[place] += 1
    return Fold(ranks, stands_for, place_of, True, size)


def part_shift(graph: RecordedGraph, following: RecordedGraph, shift: int, world_size: int) -> PartShift:
    """How parts move when all ranks are counted `shift` further, found from the graphs of two ranks.

    Raises:
        GradwireError: the second graph is not that of the first rank with ranks and parts moved.
    """
    # Parts of equal size, so the highest index says how many there are; one rank may have nothing to do with it.
    num_parts = 1 + max(int(graph.part.max()), int(following.part.max()))
    peers = np.where(graph.peer < 0, -1, (graph.peer + shift) % world_size)
    same = graph.kind.size == following.kind.size and all(
        np.array_equal(left, right)
        for left, right in (
            (graph.kind, following.kind),
            (peers, following.peer),
            (graph.successors_at, following.successors_at),
            (graph.successors, following.successors),
            (graph.work, following.work),
            (graph.stage, following.stage),
        )
    )
    if same and graph.works == following.works:
        for moved in _PART_SHIFTS:
            if np.array_equal(following.part, [moved(part, shift, num_parts) for part in graph.part.tolist()]):
                return moved
    raise GradwireError(
        "Expected a strategy whose graphs are alike on all ranks but for their numbers, got one that differs. Do: "
        "simulate in full, with fewer ranks."
    )


def deliveries(graphs: list[RecordedGraph], fold: Fold, world_size: int, moved: PartShift) -> list[tuple[int, int]]:
    """Which send ends which recv, as numbers of tasks with the graphs one behind another.

    Args:
        graphs: of one item, one a simulated rank.
        fold: the simulated ranks.
        world_size: ranks of the cluster.
        moved: how parts move with ranks.

    Raises:
        OptionError: a kind of node does not hear directly from another kind.
    """
    starts = np.cumsum([0, *(graph.kind.size for graph in graphs)]).tolist()
    num_parts = 1 + max(int(graph.part.max(initial=0)) for graph in graphs)
    sends = {key: starts[place] + task for place, graph in enumerate(graphs) for key, task in _keys(graph, SEND, place)}
    pairs, heard = [], set()
    for place, graph in enumerate(graphs):
        for (_, peer, frame, stage, part), task in _keys(graph, RECV, place):
            source = int(fold.place_of[peer])
            shift = fold.ranks[source] - peer
            to = (fold.ranks[place] + shift) % world_size
            pairs.append((sends[source, to, frame, stage, moved(part, shift, num_parts)], starts[place] + task))
            heard.add((place, source))
    _check_heard(fold, heard)
    return pairs


def _keys(graph: RecordedGraph, kind: int, place: int) -> list[tuple[tuple[int, int, int | None, int, int], int]]:
    found = np.flatnonzero(graph.kind == kind)
    columns = (graph.peer[found], graph.work[found], graph.stage[found], graph.part[found], found)
    return [
        ((place, peer, graph.works[work].frame, stage, part), task)
        for peer, work, stage, part, task in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _check_heard(fold: Fold, heard: set[tuple[int, int]]) -> None:
    size = fold.ranks_per_node
    direct = {(place // size, source // size) for place, source in heard}
    kinds = range(len(fold.ranks) // size)
    if fold.folded and any(here != there and (here, there) not in direct for here in kinds for there in kinds):
        raise OptionError(
            "Expected a strategy in which all ranks hear from stragglers directly, as scatter_reduce and allgather, "
            "got one in which they do not. Do: pass fold=False with fewer ranks, or take the stragglers out."
        )
