"""The task graphs of the strategies themselves, built and run through without data.

A strategy's own `build` makes the graph with the synchronizer's own `Builder`, preliminary rounds included. Then every
task is run once, in order, with a codec and a transport that only note what they are asked for. So a simulated graph
has the tasks, the dependencies and the frames of a real one, whatever the strategy.
"""

# Shapes: N = tasks of a graph, S = pairs of a task and one that comes after it.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from gradwire.compressors.base.registry import code
from gradwire.core.errors import UnknownNameError
from gradwire.core.events import EventStream
from gradwire.residuals.transaction import Residuals
from gradwire.simulate.loop import COMPUTE, RECV, SEND
from gradwire.sync.fusion import FusionGroup
from gradwire.sync.graph import Task, TaskGraph
from gradwire.sync.job import Chunk, EncodedChunk, TensorJob
from gradwire.sync.nodes import Nodes
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.strategies import STRATEGIES, Builder, Runtime, peer_strategies
from gradwire.wire.frame import FrameFlags, FrameKind, Header

_KINDS = {"send": SEND, "recv": RECV}
_NOTHING = np.empty(0, dtype=np.uint8)


class FusionMember(NamedTuple):
    """A tensor of a bundle.

    Attributes:
        numel: its elements.
        place: among all tensors that travel in bundles, as `TensorJob.fusion_index`.
    """

    numel: int
    place: int


class Work(NamedTuple):
    """What one task does, apart from where and for which part: tasks of equal work cost the same.

    Attributes:
        call: method of the codec, or ``"send"`` or ``"recv"``.
        frame: kind of the frame that it makes, sends or receives, if any.
        taken: kind of the messages that it takes in, if any.
        num_messages: how many it takes in.
        sizes: elements of the part; of a bundle, of each tensor in it.
        encodes_own: of a merge: whether the rank encodes its own gradient before it adds it.
        phase: its name in traces.
        share: of a frame that is carried in pieces.
        dense: of a frame that is not compressed, whatever the item's compressor: within a node.
        accumulator_bytes: bytes of one element of an accumulator; 0 for other frames.
    """

    call: str
    frame: FrameKind | None
    taken: FrameKind | None
    num_messages: int
    sizes: tuple[int, ...]
    encodes_own: bool
    phase: str
    share: float = 1.0
    dense: bool = False
    accumulator_bytes: int = 0


class RecordedGraph(NamedTuple):
    """The task graph of one item on one rank.

    Attributes:
        works: the distinct work in it.
        work: which of them each task does (N).
        kind: COMPUTE, SEND or RECV (N).
        pending: how many tasks each comes after (N).
        successors_at, successors: what comes after each task (N + 1, S).
        peer: of sends and recvs; -1 for others (N).
        part: index of the part (N).
        stage: of the encode or the frame; 0 where there is none (N).
    """

    works: list[Work]
    work: np.ndarray
    kind: np.ndarray
    pending: np.ndarray
    successors_at: np.ndarray
    successors: np.ndarray
    peer: np.ndarray
    part: np.ndarray
    stage: np.ndarray


def record(
    entry: PlanEntry,
    numel: int,
    rank: int,
    world_size: int,
    *,
    tensor: int = 0,
    ranks_per_node: int = 1,
    members: Sequence[FusionMember] = (),
) -> RecordedGraph:
    """The graph that a rank runs for one item.

    Args:
        entry: how the item travels.
        numel: its elements.
        rank: whose graph.
        world_size: ranks in the group.
        tensor: index of the item's tensor in the agreed order.
        ranks_per_node: ranks of a node, which hierarchical strategies look at.
        members: of a bundle.

    Raises:
        UnknownNameError: a strategy that needs more than the ranks.
    """
    if entry.strategy not in peer_strategies():
        raise UnknownNameError("strategy between ranks, which alone are simulated,", entry.strategy, peer_strategies())
    graph = TaskGraph("item", 0, 0, lambda: None)
    item = _item(entry, numel, tensor, members)
    notes = _Notes(item, rank, world_size)
    builder = _DryBuilder(item, graph, notes, ranks_per_node)
    STRATEGIES[entry.strategy].build(builder)
    indices: dict[Work, int] = {}
    work, parts, stages = [], [], []
    for task in graph.tasks:
        if task.key is not None:
            key = task.key
            task.value = EncodedChunk(key.kind, FrameFlags.PRESENT | FrameFlags.USED, _NOTHING, key.peer)
            sizes = builder.sizes[task]
            found = Work(
                *("recv", key.kind, None, 0, sizes, False, task.phase),
                dense=task in builder.dense_recvs,
                accumulator_bytes=notes.accumulator_bytes(key.kind, key.stage),
            )
            part, stage = key.partition, key.stage
        else:
            assert task.run is not None, f"{task.phase} has nothing to run"
            task.value = task.run()
            found = notes.last._replace(phase=task.phase)
            part, stage = notes.part, notes.stage
        work.append(indices.setdefault(found, len(indices)))
        parts.append(part)
        stages.append(stage)
    return _packed(graph, list(indices), work, parts, stages)


def _item(entry: PlanEntry, numel: int, tensor: int, members: Sequence[FusionMember]) -> TensorJob | FusionGroup:
    def empty(count: int, place: int) -> TensorJob:
        return TensorJob("item", tensor, torch.empty(count, device="meta"), entry, 0, 0, fusion_index=place)

    return FusionGroup([empty(*member) for member in members], 0) if members else empty(numel, 0)


def _packed(graph: TaskGraph, works: list[Work], work: list[int], parts: list[int], stages: list[int]) -> RecordedGraph:
    number = {id(task): index for index, task in enumerate(graph.tasks)}
    successors = [number[id(successor)] for task in graph.tasks for successor in task.successors]
    return RecordedGraph(
        works,
        np.array(work, np.int64),
        np.array([_KINDS.get(task.kind, COMPUTE) for task in graph.tasks], np.int64),
        np.array([task.pending for task in graph.tasks], np.int64),
        np.cumsum([0, *(len(task.successors) for task in graph.tasks)], dtype=np.int64),
        np.array(successors, np.int64),
        np.array([-1 if task.peer is None else task.peer for task in graph.tasks], np.int64),
        np.array(parts, np.int64),
        np.array(stages, np.int64),
    )


class _Notes:
    """Stands for the transport: notes what the latest task did."""

    epoch = 0

    def __init__(self, item: TensorJob | FusionGroup, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.last = Work("", None, None, 0, (), False, "")
        self._item = item
        self.part = self.stage = 0

    def send(self, peer: int, header: Header, body: np.ndarray) -> None:
        sizes = self.sizes(Chunk(header.partition, 0, header.count))
        dense, accumulator_bytes = header.compressor == code("none"), self.accumulator_bytes(header.kind, header.stage)
        self.last = Work(
            "send", header.kind, None, 0, sizes, False, "", dense=dense, accumulator_bytes=accumulator_bytes
        )
        self.part, self.stage = header.partition, header.stage

    def accumulator_bytes(self, kind: FrameKind, stage: int) -> int:
        """Bytes of one element of the accumulators that leave a stage; 0 for other frames."""
        is_sum = kind is FrameKind.AGGREGATE
        return self._item.entry.accumulator_dtype(stage, self.world_size).itemsize if is_sum else 0

    def sizes(self, part: Chunk) -> tuple[int, ...]:
        """Elements of each tensor in a part."""
        if isinstance(self._item, FusionGroup):
            return tuple(self._item.members[index].values.numel() for index in self._item.members_of(part))
        return (part.count,)


class _DryCodec:
    """Stands for the codec: notes the call, and gives messages without content.

    Args:
        real: the item's codec, which answers what kind of frame leaves a stage.
        notes: where calls go.
    """

    def __init__(self, real: Any, notes: _Notes) -> None:
        self._real = real
        self._notes = notes

    @property
    def first_stage(self) -> int:
        return cast(int, self._real.first_stage)

    def kind(self, stage: int) -> FrameKind:
        return cast(FrameKind, self._real.kind(stage))

    def encodes_own(self, stage: int) -> bool:
        return cast(bool, self._real.encodes_own(stage))

    def start(self, part: Chunk) -> EncodedChunk:
        return self._note("start", part, 0, (), self.kind(0))

    def merge(self, part: Chunk, messages: Sequence[EncodedChunk], stage: int) -> EncodedChunk:
        return self._note("merge", part, stage, messages, self.kind(stage), self.encodes_own(stage))

    def decode(self, part: Chunk, message: EncodedChunk, stage: int) -> None:
        self._note("decode", part, stage, [message], None)

    def decode_sum(self, part: Chunk, messages: Sequence[EncodedChunk]) -> None:
        self._note("decode_sum", part, 0, messages, None)

    def stats(self, part: Chunk, encoded: bool = True) -> EncodedChunk:
        return self._note("stats", part, 0, (), FrameKind.STATS)

    def reduce_stats(self, part: Chunk, messages: Sequence[EncodedChunk]) -> None:
        self._note("reduce_stats", part, 0, messages, None)

    def encode_from(self, stage: int, num_encoders: int) -> None:
        self._real.encode_from(stage, num_encoders)

    def encode_dense(self, part: Chunk) -> EncodedChunk:
        return self._note("dense", part, 0, (), FrameKind.PAYLOAD)

    def merge_dense(self, part: Chunk, messages: Sequence[EncodedChunk]) -> None:
        self._note("add_up", part, 0, messages, None)

    def encode_mean(self, part: Chunk, mean: EncodedChunk) -> EncodedChunk:
        return self._note("spread", part, 0, [mean], FrameKind.PAYLOAD)

    def decode_dense(self, part: Chunk, message: EncodedChunk) -> None:
        self._note("place", part, 0, [message], None)

    def _note(
        self,
        call: str,
        part: Chunk,
        stage: int,
        messages: Sequence[EncodedChunk],
        frame: FrameKind | None,
        encodes_own: bool = False,
    ) -> EncodedChunk:
        taken = messages[0].kind if messages else None
        self._notes.last = Work(call, frame, taken, len(messages), self._notes.sizes(part), encodes_own, "")
        self._notes.part, self._notes.stage = part.index, stage
        return EncodedChunk(
            frame or FrameKind.PAYLOAD, FrameFlags.PRESENT | FrameFlags.USED, _NOTHING, self._notes.rank
        )


class _DryBuilder(Builder):
    """The synchronizer's builder over a codec and a transport that only note."""

    def __init__(self, item: TensorJob | FusionGroup, graph: TaskGraph, notes: _Notes, ranks_per_node: int) -> None:
        nodes = nodes_of(notes.world_size, ranks_per_node)
        super().__init__(item, graph, Runtime(cast(Any, notes), Residuals(), EventStream(), 0, lambda: nodes))
        self._codec = cast(Any, _DryCodec(self._codec, notes))
        self._notes = notes
        self.sizes: dict[Task, tuple[int, ...]] = {}  # elements that each recv waits for
        self.dense_recvs: set[Task] = set()

    def recv_dense(self, peer: int, part: Chunk, stage: int, phase: str) -> Task:
        task = super().recv_dense(peer, part, stage, phase)
        self.dense_recvs.add(task)
        return task

    def _recv(self, peer: int, kind: FrameKind, part: Chunk, stage: int, phase: str) -> Task:
        task = super()._recv(peer, kind, part, stage, phase)
        self.sizes[task] = self._notes.sizes(part)
        return task


def nodes_of(world_size: int, ranks_per_node: int) -> Nodes:
    """The ranks of each node, counted node by node."""
    return tuple(tuple(range(first, first + ranks_per_node)) for first in range(0, world_size, ranks_per_node))
