"""From items, ranks and prices to the tasks that the engine runs."""

# Shapes: N = tasks, G = graphs: one a simulated rank of each item, item by item.

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradwire.core.errors import OptionError
from gradwire.simulate.chunks import in_chunks, num_chunks
from gradwire.simulate.cluster import Cluster
from gradwire.simulate.fold import Fold, PartShift, deliveries, part_shift
from gradwire.simulate.loop import RECV, SEND
from gradwire.simulate.recording import FusionMember, RecordedGraph, Work, record
from gradwire.simulate.tasks import Tasks
from gradwire.sync.job import RANGE_ALIGNMENT, split
from gradwire.sync.plan_entry import PlanEntry

MAX_TASKS = 30_000_000
"""Above this memory and patience run out."""
MAX_KEPT_TASKS = 2_500_000
"""Of graphs that are kept for later steps: about 250 MB."""


class Prices(Protocol):
    """What the work of one item costs."""

    def seconds(self, work: Work, sizes: Sequence[int]) -> float:
        """Of the processor, for a part whose tensors have so many elements."""
        ...

    def frame_bytes(self, work: Work, sizes: Sequence[int]) -> float:
        """Of the frame of a send or a recv, header included, or of its piece."""
        ...

    @property
    def carries(self) -> bool:
        """Whether frames cost the processor time by their size."""
        ...


@dataclass(frozen=True)
class SimulatedItem:
    """What one task graph synchronizes.

    Attributes:
        name: of the tensor, or made up for a batch or a bundle.
        numel: elements.
        entry: how it travels.
        ready_seconds: when its gradient is there, from the beginning of the step on a typical rank.
        tensor: index in the agreed order.
        prices: what its work costs.
        members: the tensors of a bundle.
    """

    name: str
    numel: int
    entry: PlanEntry
    ready_seconds: float
    tensor: int
    prices: Prices
    members: tuple[FusionMember, ...] = ()


class Assembled(NamedTuple):
    """The input of the engine, and what it means.

    Attributes:
        tasks: for `gradwire.simulate.events.simulate`.
        num_processors, num_channels, num_groups: for the same; an engine a rank, then the transport's thread of each.
        works: the distinct work of each item.
        work: which of its item's works each task does (N).
        part: index of the part (N).
        nbytes: of the frame of a send or a recv (N).
        graph_item, graph_place: item and simulated rank of each graph (G).
        sent_bytes: of each simulated rank, the mean over those that it stands for.
        sent_frames: the same of frames.
        num_messages: of all ranks of the cluster.
    """

    tasks: Tasks
    num_processors: int
    num_channels: int
    num_groups: int
    works: list[list[Work]]
    work: np.ndarray
    part: np.ndarray
    nbytes: np.ndarray
    graph_item: np.ndarray
    graph_place: np.ndarray
    sent_bytes: np.ndarray
    sent_frames: np.ndarray
    num_messages: float


class _Shape(NamedTuple):
    """The graphs of an item on all simulated ranks, and which send ends which recv."""

    graphs: list[RecordedGraph]
    pairs: np.ndarray

    @property
    def num_tasks(self) -> int:
        return sum(graph.kind.size for graph in self.graphs)


def assemble(items: Sequence[SimulatedItem], cluster: Cluster, fold: Fold) -> Assembled:
    """Lay out all graphs of all simulated ranks.

    Raises:
        OptionError: so many tasks that a simulation would not end.
    """
    layout = _Layout(cluster, fold)
    where = (cluster.ranks, cluster.ranks_per_node, fold.folded, fold.place_of.tobytes())
    for priority, item in enumerate(items):
        layout.add(item, _kept_shape(where, item, cluster, fold), priority)
    return layout.done()


_kept: dict[object, _Shape] = {}  # of earlier steps: what a sweep changes are mostly rates and costs


def _kept_shape(where: object, item: SimulatedItem, cluster: Cluster, fold: Fold) -> _Shape:
    key = (where, _shape_key(item, fold))
    if key not in _kept:
        shape = _shape(item, cluster, fold)
        if sum(kept.num_tasks for kept in _kept.values()) + shape.num_tasks > MAX_KEPT_TASKS:
            _kept.clear()
        _kept[key] = shape
    return _kept[key]


def _shape_key(item: SimulatedItem, fold: Fold) -> object:
    """Items of equal keys have equal graphs."""
    how = (repr(item.entry.compressor), item.entry.strategy, item.entry.partitions)
    return how if fold.folded else (*how, item.numel, item.tensor, item.members)


def _shape(item: SimulatedItem, cluster: Cluster, fold: Fold) -> _Shape:
    entry, world_size, step = item.entry, cluster.ranks, cluster.ranks_per_node
    if not fold.folded:
        how: dict[str, Any] = {"tensor": item.tensor, "ranks_per_node": step, "members": item.members}
        graphs = [record(entry, item.numel, rank, world_size, **how) for rank in fold.ranks]
        return _Shape(graphs, _pairs(graphs, fold, world_size, lambda part, *_: part))
    # Enough blocks that any number of parts that a strategy cuts into comes out even.
    numel = world_size * entry.partitions * RANGE_ALIGNMENT
    graphs = [record(entry, numel, rank, world_size, ranks_per_node=step) for rank in fold.ranks]
    following = record(entry, numel, (fold.ranks[0] + step) % world_size, world_size, ranks_per_node=step)
    moved = part_shift(graphs[0], following, step, world_size)
    return _Shape(graphs, _pairs(graphs, fold, world_size, moved))


def _pairs(graphs: list[RecordedGraph], fold: Fold, world_size: int, moved: PartShift) -> np.ndarray:
    return np.array(deliveries(graphs, fold, world_size, moved), np.int64).reshape(-1, 2)


class _Layout:
    """Collects the arrays of `Tasks`, graph by graph."""

    def __init__(self, cluster: Cluster, fold: Fold) -> None:
        self._cluster = cluster
        self._fold = fold
        self._arrays: dict[str, list[np.ndarray]] = defaultdict(list)
        self._works: list[list[Work]] = []
        self._graphs: list[tuple[int, int, float]] = []  # item, place, ready
        self._lengths: list[int] = [0]
        self._pairs: list[np.ndarray] = []
        self._num_tasks = self._num_groups = 0
        self._sent_bytes = np.zeros(len(fold.ranks))
        self._sent_frames = np.zeros(len(fold.ranks))

    def add(self, item: SimulatedItem, shape: _Shape, priority: int) -> None:
        """Add the graphs of one item."""
        graphs, pairs = shape
        if item.prices.carries:
            graphs, pairs = self._in_chunks(item, shape)
        count = sum(graph.kind.size for graph in graphs)
        if self._num_tasks + count > MAX_TASKS:
            raise OptionError(
                f"Expected at most {MAX_TASKS} tasks, got more at item {priority}, {item.name} ({count} tasks, "
                f"{item.entry.compressor!r}, {item.entry.strategy}). Do: fewer ranks or partitions; or a compressor "
                "without a preliminary round, in which all ranks send to all others for each part."
            )
        self._pairs.append(pairs + self._num_tasks)
        self._num_tasks += count
        self._works.append([])
        for place, graph in enumerate(graphs):
            self._add_graph(item, graph, place, priority)

    def _in_chunks(self, item: SimulatedItem, shape: _Shape) -> _Shape:
        """The same graphs with frames in pieces, each piece of a send for the same piece of its recv."""

        def chunks_of(work: Work) -> int:
            return num_chunks(max(item.prices.frame_bytes(work, sizes) for sizes, _ in self._sizes(item, work)))

        cut = [in_chunks(graph, chunks_of) for graph in shape.graphs]
        starts = np.cumsum([0, *(graph.kind.size for graph, _, _ in cut)])
        first = np.concatenate([first + start for (_, first, _), start in zip(cut, starts)])
        pieces = np.concatenate([pieces for _, _, pieces in cut])[shape.pairs[:, 0]]
        offset = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        pairs = np.repeat(first[shape.pairs], pieces, axis=0) + offset[:, None]
        return _Shape([graph for graph, _, _ in cut], pairs)

    def _add_graph(self, item: SimulatedItem, graph: RecordedGraph, place: int, priority: int) -> None:
        rank, add = self._fold.ranks[place], self._append
        straggler, ones = self._cluster.straggler(rank), np.ones(graph.kind.size, np.int64)
        costs = np.array([self._costs(item, work) for work in graph.works])[graph.work]
        add("kind", graph.kind)
        carried = np.isin(graph.kind, (SEND, RECV)) & item.prices.carries
        add("processor", place * ones + len(self._fold.ranks) * carried)
        add("priority", priority * ones)
        add("pending", graph.pending)
        add("seconds", costs[:, 0] * straggler.slowdown)
        add("occupancy", costs[:, 1] * straggler.slowdown)
        add("successors", graph.successors + self._lengths[-1])
        add("num_successors", np.diff(graph.successors_at))
        add("part", graph.part)
        add("work", graph.work + len(self._works[-1]))
        self._works[-1].extend(graph.works)
        self._add_messages(graph, place, costs)
        self._graphs.append((priority, place, straggler.delay_seconds + straggler.slowdown * item.ready_seconds))
        self._lengths.append(self._lengths[-1] + graph.kind.size)

    def _add_messages(self, graph: RecordedGraph, place: int, costs: np.ndarray) -> None:
        """Channels and times of the messages of a graph."""
        cluster, add = self._cluster, self._append
        node = cluster.node(self._fold.ranks[place])
        inner = (graph.peer // cluster.ranks_per_node == node) & (graph.peer >= 0)
        incoming = (graph.kind == RECV).astype(np.int64)
        num_nodes = len(self._fold.ranks) // cluster.ranks_per_node
        outer_channel, inner_channel = place // cluster.ranks_per_node, num_nodes + place
        add("channel", 2 * np.where(inner, inner_channel, outer_channel) + incoming)
        outer, inside = cluster.outer_link(node), cluster.inner
        sends = graph.kind == SEND
        pace = np.where(inner, inside.seconds_a_byte, outer.seconds_a_byte)
        acks = np.where(inner, inside.ack_seconds_a_byte, outer.ack_seconds_a_byte)
        each = np.where(inner, inside.header_seconds, outer.header_seconds)
        each += sends * np.where(inner, inside.message_seconds, outer.message_seconds)
        add("nbytes", costs[:, 2])
        add("wire_seconds", costs[:, 2] * pace + costs[:, 5] * each)
        add("wire_occupancy", costs[:, 3] * pace + costs[:, 4] * each)
        add("ack_seconds", costs[:, 3] * acks)
        add("latency", np.where(inner, inside.latency_seconds, outer.latency_seconds))
        add("group", self._num_groups + 4 * graph.part + 2 * inner + incoming)
        self._num_groups += 4 * (1 + int(graph.part.max(initial=0)))
        self._sent_bytes[place] += costs[sends, 3].sum()
        self._sent_frames[place] += costs[sends, 4].sum()

    def _sizes(self, item: SimulatedItem, work: Work) -> list[tuple[tuple[int, ...], float]]:
        """The sizes of the parts that a task of this work may have, each with its share of all parts."""
        if not self._fold.folded:
            return [(work.sizes, 1.0)]
        padded = self._cluster.ranks * item.entry.partitions * RANGE_ALIGNMENT
        return _part_sizes(item.numel, item.members, padded // work.sizes[0])

    def _costs(self, item: SimulatedItem, work: Work) -> tuple[float, ...]:
        """Of one task of this work: seconds and their mean, bytes and theirs, the mean of frames, and frames."""
        parts = self._sizes(item, work)
        shares = [share for _, share in parts]
        seconds = [item.prices.seconds(work, sizes) for sizes, _ in parts]
        nbytes = [0.0] * len(parts)
        if work.call in ("send", "recv"):
            nbytes = [item.prices.frame_bytes(work, sizes) for sizes, _ in parts]
        return (
            *(max(seconds), float(np.dot(seconds, shares))),
            *(max(nbytes), float(np.dot(nbytes, shares))),
            *(work.share * sum(shares), work.share),
        )

    def _append(self, name: str, values: np.ndarray) -> None:
        self._arrays[name].append(values)

    def done(self) -> Assembled:
        """The whole."""
        joined = {name: np.concatenate(arrays) for name, arrays in self._arrays.items()}
        pairs = np.concatenate(self._pairs)
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        graph_item, graph_place, ready = (np.array(column) for column in zip(*self._graphs, strict=True))
        num_deliveries = np.bincount(pairs[:, 0], minlength=self._num_tasks)
        tasks = Tasks(
            **{name: joined[name] for name in Tasks._fields if name in joined},
            successors_at=_starts(joined["num_successors"]),
            graph_at=np.array(self._lengths, np.int64),
            graph_ready=ready.astype(np.float64),
            deliveries_at=_starts(num_deliveries),
            deliveries=np.ascontiguousarray(pairs[:, 1]),
        )
        stands_for = np.array(self._fold.stands_for)
        num_channels = 2 * (len(self._fold.ranks) // self._cluster.ranks_per_node + len(self._fold.ranks))
        return Assembled(
            tasks, 2 * len(self._fold.ranks), num_channels, self._num_groups, self._works, joined["work"],
            joined["part"], joined["nbytes"], graph_item, graph_place, self._sent_bytes, self._sent_frames,
            float(self._sent_frames @ stands_for),
        )  # fmt: skip


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


@functools.lru_cache(maxsize=4096)
def _part_sizes(numel: int, members: tuple[FusionMember, ...], num_parts: int) -> list[tuple[tuple[int, ...], float]]:
    """The sizes of the parts that are not empty, each with its share of all parts; as `Item` and `Bundle` cut."""
    parts: dict[int, tuple[int, ...]] = {part.index: (part.count,) for part in split(numel, num_parts) if part.count}
    if members:
        parts = {}
        for member in members:
            part = member.place % num_parts
            parts[part] = (*parts.get(part, ()), member.numel)
    found = Counter(parts.values())
    return [(sizes, number / num_parts) for sizes, number in sorted(found.items())]
