"""Which ranks are simulated, and where their messages come from.

A full simulation runs every rank. A folded one runs one node for all nodes that are like it (one rank, if nodes have
one): strategies treat all ranks the same but for their numbers. What a rank receives from the rank d places ahead of it
leaves there when its own message for the rank d places behind it leaves. A step of W ranks then costs what the graphs
of one rank cost.

Folding assumes that
 - the graph of rank r + M is the graph of rank r with all rank numbers, and perhaps all chunk numbers, M higher, except
   of what is about a whole fusion group. This is checked;
 - all chunks of a job are equal. Real chunks are cut at multiples of 1,024 elements or more, so some are larger than
   others and, with more ranks than blocks, most are empty. A simulated chunk takes as long as the largest real one, and
   occupies processor and network for the mean over all chunks, empty ones included. So the time of one chunk and the
   load of a rank are right, but not which rank is busier at which moment;
 - ranks own equal shares. Dense groups on a ring all begin with rank 0. With one partition each, rank 0 adds all of
   them, and the real step takes up to half longer;
 - each kind of node hears directly from each other kind. In a ring, the effect of a straggler travels hop by hop, so a
   ring with stragglers cannot be folded.
"""

# Shapes: W = ranks, M = ranks of a node.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gradwire.core.errors import GradwireError, OptionError
from gradwire.simulate.cluster import Cluster
from gradwire.simulate.graphs import RankGraph
from gradwire.simulate.loop import RECV, SEND

ChunkShift = Callable[[int, int, int], int]
"""Index of a chunk after a shift of the ranks, from its index, the shift and the number of chunks."""

_CHUNK_SHIFTS: tuple[ChunkShift, ...] = (
    lambda chunk, shift, num_chunks: chunk,  # every rank begins with the same chunk
    # Each rank begins with a chunk of its own.
    lambda chunk, shift, num_chunks: chunk if chunk < 0 else (chunk + shift) % num_chunks,
)


class Fold(NamedTuple):
    """The ranks that are simulated.

    Attributes:
        ranks: Numbers of the simulated ranks.
        stands_for: Number of ranks that each stands for, itself included.
        index_of: For every rank of the cluster, the index in `ranks` of the rank that stands for it (W).
        folded: Whether one rank stands for many.
        ranks_per_node: Ranks that are simulated together (M).
    """

    ranks: list[int]
    stands_for: list[int]
    index_of: np.ndarray
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
        OptionError: Ranks share cores, so that none can stand for others.
    """
    if cluster.cores is not None:
        raise OptionError(
            f"A cluster whose ranks share {cluster.cores} cores cannot be folded. Pass fold=False, or cores=None."
        )
    size = cluster.ranks_per_node
    nodes: dict[tuple[object, ...], int] = {}  # by kind of node: the index of its first rank
    ranks: list[int] = []
    stands_for: list[int] = []
    index_of = np.empty(cluster.ranks, np.int64)
    for node in range(cluster.ranks // size):
        members = cluster.members(node)
        kind = tuple(cluster.straggler(rank) for rank in members)
        if kind not in nodes:
            nodes[kind] = len(ranks)
            ranks.extend(members)
            stands_for.extend([0] * size)
        first = nodes[kind]
        index_of[members.start : members.stop] = range(first, first + size)
        for index in range(first, first + size):
            stands_for[index] += 1
    return Fold(ranks, stands_for, index_of, True, size)


def chunk_shift(graph: RankGraph, following: RankGraph, shift: int, world_size: int) -> ChunkShift:
    """How chunks move if all rank numbers grow by `shift`, found from the graphs of two ranks.

    Raises:
        GradwireError: The second graph is not the first with rank and chunk numbers shifted.
    """
    # Chunks have equal sizes, so the highest index tells their number; one rank may have nothing to do with it.
    num_chunks = 1 + max(int(graph.chunk.max()), int(following.chunk.max()))
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
        for moved in _CHUNK_SHIFTS:
            if np.array_equal(following.chunk, [moved(chunk, shift, num_chunks) for chunk in graph.chunk.tolist()]):
                return moved
    raise GradwireError(
        "This strategy cannot be folded: its graphs differ between ranks by more than rank and chunk numbers. Pass "
        "fold=False, with fewer ranks."
    )


def deliveries(graphs: list[RankGraph], fold: Fold, world_size: int, moved: ChunkShift) -> list[tuple[int, int]]:
    """Which send ends which recv, as task numbers over all graphs, one after another.

    Args:
        graphs: Graphs of one job, one per simulated rank.
        fold: Simulated ranks.
        world_size: Ranks of the cluster.
        moved: How chunks move with ranks.

    Raises:
        OptionError: A kind of node does not hear directly from another kind.
    """
    starts = np.cumsum([0, *(graph.kind.size for graph in graphs)]).tolist()
    num_chunks = 1 + max(int(graph.chunk.max(initial=0)) for graph in graphs)
    sends = {key: starts[index] + task for index, graph in enumerate(graphs) for key, task in _keys(graph, SEND, index)}
    pairs, heard = [], set()
    for index, graph in enumerate(graphs):
        for (_, peer, frame, stage, chunk), task in _keys(graph, RECV, index):
            source = int(fold.index_of[peer])
            shift = fold.ranks[source] - peer
            to = (fold.ranks[index] + shift) % world_size
            pairs.append((sends[source, to, frame, stage, moved(chunk, shift, num_chunks)], starts[index] + task))
            heard.add((index, source))
    _check_heard(fold, heard)
    return pairs


def _keys(graph: RankGraph, kind: int, index: int) -> list[tuple[tuple[int, int, int | None, int, int], int]]:
    """The sends or recvs of a rank: (index of the rank, peer, frame kind, stage, chunk), and the task's number."""
    found = np.flatnonzero(graph.kind == kind)
    columns = (graph.peer[found], graph.work[found], graph.stage[found], graph.chunk[found], found)
    return [
        ((index, peer, graph.works[work].frame, stage, chunk), task)
        for peer, work, stage, chunk, task in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _check_heard(fold: Fold, heard: set[tuple[int, int]]) -> None:
    size = fold.ranks_per_node
    direct = {(index // size, source // size) for index, source in heard}
    kinds = range(len(fold.ranks) // size)
    if fold.folded and any(here != there and (here, there) not in direct for here in kinds for there in kinds):
        raise OptionError(
            "A step with stragglers can be folded only if all ranks hear from stragglers directly, as in "
            "scatter_reduce and allgather. Pass fold=False with fewer ranks, or leave the stragglers out."
        )
