"""From jobs, ranks and prices to the tasks that the event loop runs."""

# Shapes: N = tasks, G = graphs: one per job and simulated rank, job by job.

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gradwire.core.errors import OptionError
from gradwire.simulate.cluster import Cluster, SimulatedLink
from gradwire.simulate.fold import ChunkShift, Fold, chunk_shift, deliveries
from gradwire.simulate.fragments import in_fragments, num_fragments, offsets
from gradwire.simulate.graphs import FusionMember, RankGraph, Shapes, Work, graph_of
from gradwire.simulate.loop import RECV, SEND
from gradwire.simulate.prices import PriceList
from gradwire.simulate.served import served_graphs
from gradwire.simulate.tasks import Tasks
from gradwire.sync.chunk import split
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.strategies import STRATEGIES

MAX_TASKS = 30_000_000
"""Most tasks of a simulation. More would exhaust memory and patience."""
MAX_CACHED_TASKS = 2_500_000
"""Most tasks of graphs that are cached for later steps: about 250 MB."""


@dataclass(frozen=True)
class SimulatedJob:
    """One tensor, or one fusion group, with operations of its own.

    Attributes:
        name: Name of the tensor, or of the first tensor of the group.
        shape: Shape of the tensor, or the number of elements of the group.
        entry: Plan entry.
        ready_seconds: When its gradient is ready on a typical rank, in seconds from the beginning of the step.
        rotation: Rank that owns the first range, modulo the number of ranks.
        prices: Costs of its tasks and frames.
        members: Tensors of a compressed fusion group.
    """

    name: str
    shape: tuple[int, ...]
    entry: PlanEntry
    ready_seconds: float
    rotation: int
    prices: PriceList
    members: tuple[FusionMember, ...] = ()

    def num_chunks(self, world_size: int) -> tuple[int, int]:
        """Number of chunks that it is cut into, and of those in folded graphs, in which all ranks own as many."""
        shares = world_size if STRATEGIES[self.entry.strategy].has_owners else 1
        cut = shares if self.members else self.entry.num_ranges(math.prod(self.shape), shares)
        return cut, -(-cut // shares) * shares


class Assembled(NamedTuple):
    """Input of the event loop, and what its tasks stand for.

    Attributes:
        tasks: Tasks of all graphs.
        num_processors: Processors: the engine of each rank, then the transport thread of each. The server is a rank
            more: it receives on the first and sends on the second.
        num_channels: Channels: both directions of each node's link, then of each end's link within its node.
        num_groups: Groups of messages.
        works: Distinct work of each job.
        work: Index into the works of the task's job (N).
        chunk: Index of the task's chunk; -1 for all chunks of a fusion group (N).
        nbytes: Bytes of the frame of a send or a recv (N).
        graph_job: Job of each graph (G).
        graph_rank: Simulated rank of each graph, as an index into `Fold.ranks`; the next index for the server (G).
        sent_bytes: Bytes sent by each simulated rank, the mean over the ranks that it stands for; and by the server.
        num_messages: Frames sent by all ranks of the cluster and the server.
    """

    tasks: Tasks
    num_processors: int
    num_channels: int
    num_groups: int
    works: list[list[Work]]
    work: np.ndarray
    chunk: np.ndarray
    nbytes: np.ndarray
    graph_job: np.ndarray
    graph_rank: np.ndarray
    sent_bytes: np.ndarray
    num_messages: float

    @property
    def num_ends(self) -> int:
        """Simulated ranks, and the server if there is one."""
        return self.num_processors // 2

    def inner_channel(self, index: int) -> int:
        """The sending direction of an end's link within its node. The other direction follows."""
        return self.num_channels - 2 * (self.num_ends - index)


class _JobGraphs(NamedTuple):
    """The graphs of a job on all simulated ranks, and which send ends which recv."""

    graphs: list[RankGraph]
    pairs: np.ndarray

    @property
    def num_tasks(self) -> int:
        return sum(graph.kind.size for graph in self.graphs)


def assemble(jobs: Sequence[SimulatedJob], cluster: Cluster, fold: Fold) -> Assembled:
    """Lay out all graphs of all simulated ranks.

    Raises:
        OptionError: There are more than `MAX_TASKS` tasks.
    """
    layout = _Layout(cluster, fold, any(job.prices.served for job in jobs))
    for priority, job in enumerate(jobs):
        layout.add(job, _cached_graphs(job, cluster, fold), priority)
    return layout.done()


_cache: dict[object, _JobGraphs] = {}  # of earlier steps: a sweep changes mostly rates and costs


def _cached_graphs(job: SimulatedJob, cluster: Cluster, fold: Fold) -> _JobGraphs:
    entry = job.entry
    key = (
        *(cluster.ranks, cluster.ranks_per_node, fold.folded, fold.index_of.tobytes()),
        *(repr(entry.compressor), entry.strategy, job.num_chunks(cluster.ranks)[fold.folded]),
        bool(job.members) if fold.folded else (job.shape, job.rotation, job.members),
        cluster.server if job.prices.served else None,
    )
    if key not in _cache:
        made = _graphs(job, cluster, fold)
        if sum(each.num_tasks for each in _cache.values()) + made.num_tasks > MAX_CACHED_TASKS:
            _cache.clear()
        _cache[key] = made
    return _cache[key]


def _graphs(job: SimulatedJob, cluster: Cluster, fold: Fold) -> _JobGraphs:
    entry, world_size, step = job.entry, cluster.ranks, cluster.ranks_per_node
    if job.prices.served is not None:
        assert cluster.server is not None and not fold.folded
        return _JobGraphs(*served_graphs(entry, job.shape, world_size, job.prices.served, cluster.server))
    if not fold.folded:
        graphs = [
            graph_of(
                *(entry, job.shape, rank, world_size),
                rotation=job.rotation,
                ranks_per_node=step,
                members=job.members,
            )
            for rank in fold.ranks
        ]
        return _JobGraphs(graphs, _pairs(graphs, fold, world_size, lambda chunk, *_: chunk))
    _, num_chunks = job.num_chunks(world_size)
    entry, count = replace(entry, partitions=num_chunks), entry.range_alignment
    shape = (num_chunks * count,)  # equal chunks
    # A full tensor in one chunk is folded as a fusion group of one tensor.
    is_grouped = job.members or entry.compressor.requires_full_tensor
    members = [FusionMember((count,), index) for index in range(num_chunks)] if is_grouped else []
    *graphs, following = (
        graph_of(entry, shape, rank, world_size, ranks_per_node=step, members=members)
        for rank in (*fold.ranks, (fold.ranks[0] + step) % world_size)
    )
    moved = chunk_shift(graphs[0], following, step, world_size)
    return _JobGraphs(graphs, _pairs(graphs, fold, world_size, moved))


def _pairs(graphs: list[RankGraph], fold: Fold, world_size: int, moved: ChunkShift) -> np.ndarray:
    return np.array(deliveries(graphs, fold, world_size, moved), np.int64).reshape(-1, 2)


class _Layout:
    """Collects the arrays of `Tasks`, graph by graph."""

    def __init__(self, cluster: Cluster, fold: Fold, has_server: bool) -> None:
        self._cluster = cluster
        self._fold = fold
        self._num_ends = len(fold.ranks) + has_server
        self._arrays: dict[str, list[np.ndarray]] = defaultdict(list)
        self._works: list[list[Work]] = []
        self._graphs: list[tuple[int, int, float]] = []  # job, index of the rank, seconds at which it is ready
        self._lengths: list[int] = [0]
        self._pairs: list[np.ndarray] = []
        self._num_tasks = self._num_groups = 0
        self._sent_bytes = np.zeros(self._num_ends)
        self._sent_frames = np.zeros(self._num_ends)

    def add(self, job: SimulatedJob, made: _JobGraphs, priority: int) -> None:
        """Add the graphs of one job."""
        whole = job.prices.served is not None or not job.prices.carries  # a server's messages are fragments already
        graphs, pairs = made if whole else self._in_fragments(job, made)
        count = sum(graph.kind.size for graph in graphs)
        if self._num_tasks + count > MAX_TASKS:
            raise OptionError(
                f"The step has more than {MAX_TASKS} tasks: job {priority}, {job.name}, adds {count} "
                f"({job.entry.compressor!r}, {job.entry.strategy}). Take fewer ranks or partitions, or a compressor "
                "without a preliminary round, in which all ranks send to all others for each chunk."
            )
        self._pairs.append(pairs + self._num_tasks)
        self._num_tasks += count
        self._works.append([])
        for index, graph in enumerate(graphs):
            self._add_graph(job, graph, index, priority)

    def _in_fragments(self, job: SimulatedJob, made: _JobGraphs) -> _JobGraphs:
        """The same graphs with fragmented frames, each fragment of a send for the same fragment of its recv."""

        def fragments_of(work: Work) -> int:
            return num_fragments(max(job.prices.frame_bytes(work, shapes) for shapes, _ in self._shapes(job, work)))

        cut = [in_fragments(graph, fragments_of) for graph in made.graphs]
        starts = np.cumsum([0, *(graph.kind.size for graph, _, _ in cut)])
        first = np.concatenate([first + start for (_, first, _), start in zip(cut, starts)])
        fragments = np.concatenate([fragments for _, _, fragments in cut])[made.pairs[:, 0]]
        pairs = np.repeat(first[made.pairs], fragments, axis=0) + offsets(fragments)[:, None]
        return _JobGraphs([graph for graph, _, _ in cut], pairs)

    def _add_graph(self, job: SimulatedJob, graph: RankGraph, index: int, priority: int) -> None:
        add, ones = self._append, np.ones(graph.kind.size, np.int64)
        straggler = self._cluster.straggler(self._rank(index))
        costs = np.array([self._costs(job, work) for work in graph.works])[graph.work]
        add("kind", graph.kind)
        carried = np.isin(graph.kind, (SEND, RECV)) & (job.prices.carries or job.prices.served is not None)
        if index == len(self._fold.ranks):
            carried = graph.kind == SEND  # a server's results do not wait behind packets that have arrived
        add("processor", index * ones + self._num_ends * carried)
        add("priority", priority * ones)
        add("pending", graph.pending)
        add("seconds", costs[:, 0] * straggler.slowdown)
        add("occupancy", costs[:, 1] * straggler.slowdown)
        add("successors", graph.successors + self._lengths[-1])
        add("num_successors", np.diff(graph.successors_at))
        add("chunk", graph.chunk)
        add("work", graph.work + len(self._works[-1]))
        self._works[-1].extend(graph.works)
        self._add_messages(graph, index, costs, job.prices.served is not None)
        self._graphs.append((priority, index, straggler.delay_seconds + straggler.slowdown * job.ready_seconds))
        self._lengths.append(self._lengths[-1] + graph.kind.size)

    def _rank(self, index: int) -> int:
        """Number of a simulated rank, or of the server, which follows those of all ranks."""
        return self._fold.ranks[index] if index < len(self._fold.ranks) else self._cluster.ranks

    def _add_messages(self, graph: RankGraph, index: int, costs: np.ndarray, served: bool) -> None:
        """Channels and times of the messages of a graph."""
        cluster, add = self._cluster, self._append
        node = cluster.node(self._rank(index))
        inner = (graph.peer // cluster.ranks_per_node == node) & (graph.peer >= 0)
        incoming = (graph.kind == RECV).astype(np.int64)
        num_nodes = self._num_nodes
        outer_channel, inner_channel = index // cluster.ranks_per_node, num_nodes + index
        add("channel", 2 * np.where(inner, inner_channel, outer_channel) + incoming)
        outer, inside = self._outer_link(index, served), cluster.inner
        sends = graph.kind == SEND
        per_byte = np.where(inner, inside.seconds_per_byte, outer.seconds_per_byte)
        acks = np.where(inner, inside.ack_seconds_per_byte, outer.ack_seconds_per_byte)
        each = np.where(inner, inside.header_seconds, outer.header_seconds)
        each += sends * np.where(inner, inside.message_seconds, outer.message_seconds)
        add("nbytes", costs[:, 2])
        add("wire_seconds", costs[:, 2] * per_byte + costs[:, 5] * each)
        add("wire_occupancy", costs[:, 3] * per_byte + costs[:, 4] * each)
        add("ack_seconds", costs[:, 3] * acks)
        add("latency", np.where(inner, inside.latency_seconds, outer.latency_seconds))
        add("group", self._num_groups + 4 * (1 + graph.chunk) + 2 * inner + incoming)
        self._num_groups += 4 * (2 + int(graph.chunk.max(initial=0)))
        self._sent_bytes[index] += costs[sends, 3].sum()
        self._sent_frames[index] += costs[sends, 4].sum()

    @property
    def _num_nodes(self) -> int:
        """Simulated nodes; the server is a node of its own."""
        ranks = len(self._fold.ranks)
        return ranks // self._cluster.ranks_per_node + self._num_ends - ranks

    def _outer_link(self, index: int, served: bool) -> SimulatedLink:
        """Link of a simulated rank's node, or of the server, as the messages of a job take it."""
        cluster = self._cluster
        if not served:
            return cluster.outer_link(cluster.node(self._rank(index)))
        assert cluster.server is not None
        if index == len(self._fold.ranks):
            return cluster.server.over(cluster.server.link or cluster.link)
        return cluster.server.over(cluster.outer_link(cluster.node(self._rank(index))))

    def _shapes(self, job: SimulatedJob, work: Work) -> list[tuple[Shapes, float]]:
        """Shapes in the chunks that a task of this work may have, each with its share of all chunks."""
        if not self._fold.folded:
            return [(work.shapes, 1.0)]
        if work.whole:
            return [(tuple(member.shape for member in job.members) or (job.shape,), 1.0)]
        return _chunk_shapes(job.shape, job.members, *job.num_chunks(self._cluster.ranks), job.entry.range_alignment)

    def _costs(self, job: SimulatedJob, work: Work) -> tuple[float, ...]:
        """Costs of a task of this work: seconds and their mean, bytes and their mean, mean of frames, and frames."""
        chunks = self._shapes(job, work)
        shares = [share for _, share in chunks]
        seconds = [job.prices.seconds(work, shapes) for shapes, _ in chunks]
        nbytes = [0.0] * len(chunks)
        if work.call in ("send", "recv"):
            nbytes = [job.prices.frame_bytes(work, shapes) for shapes, _ in chunks]
        return (
            *(max(seconds), float(np.dot(seconds, shares))),
            *(max(nbytes), float(np.dot(nbytes, shares))),
            *(work.share * sum(shares), work.share),
        )

    def _append(self, name: str, values: np.ndarray) -> None:
        self._arrays[name].append(values)

    def done(self) -> Assembled:
        """Join the arrays."""
        joined = {name: np.concatenate(arrays) for name, arrays in self._arrays.items()}
        pairs = np.concatenate(self._pairs)
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        graph_job, graph_rank, ready = (np.array(column) for column in zip(*self._graphs, strict=True))
        num_deliveries = np.bincount(pairs[:, 0], minlength=self._num_tasks)
        tasks = Tasks(
            **{name: joined[name] for name in Tasks._fields if name in joined},
            successors_at=_starts(joined["num_successors"]),
            graph_at=np.array(self._lengths, np.int64),
            graph_ready=ready.astype(np.float64),
            deliveries_at=_starts(num_deliveries),
            deliveries=np.ascontiguousarray(pairs[:, 1]),
        )
        num_ranks = len(self._fold.ranks)
        stands_for = np.array([*self._fold.stands_for, *[1] * (self._num_ends - num_ranks)])
        return Assembled(
            tasks,
            num_processors=2 * self._num_ends,
            num_channels=2 * (self._num_nodes + self._num_ends),
            num_groups=self._num_groups,
            works=self._works,
            work=joined["work"],
            chunk=joined["chunk"],
            nbytes=joined["nbytes"],
            graph_job=graph_job,
            graph_rank=graph_rank,
            sent_bytes=self._sent_bytes,
            num_messages=float(self._sent_frames @ stands_for),
        )


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


@functools.lru_cache(maxsize=4096)
def _chunk_shapes(
    shape: tuple[int, ...], members: tuple[FusionMember, ...], cut: int, num_chunks: int, alignment: int
) -> list[tuple[Shapes, float]]:
    """Shapes in the chunks that are not empty, each with its share of all chunks, cut as the synchronizer cuts them.

    Args:
        shape: Shape of the tensor.
        members: Tensors of a compressed fusion group.
        cut: Number of chunks that they are cut into.
        num_chunks: Number of chunks of the simulated job.
        alignment: Elements of whose multiples chunks begin.
    """
    chunks: dict[int, Shapes] = {
        chunk.index: (shape if cut == 1 else (chunk.count,),)
        for chunk in split(math.prod(shape), cut, alignment)
        if chunk.count
    }
    if members:
        chunks = {}
        for member in members:
            index = member.rotation % num_chunks
            chunks[index] = (*chunks.get(index, ()), member.shape)
    found = Counter(chunks.values())
    return [(shapes, number / num_chunks) for shapes, number in sorted(found.items())]
