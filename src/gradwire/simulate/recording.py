"""The task graphs of the real strategies, built and run once without data.

A strategy's `build` makes the graph with the synchronizer's `Builder`, preliminary rounds included. Every task then
runs once, in order, with a codec and a transport that only record calls. So a simulated graph has the tasks,
dependencies and frames of a real one, whatever the strategy.
"""

# Shapes: N = tasks of a graph, S = pairs of a task and a successor.

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
from gradwire.sync.fusion import FusionGroup, FusionLayout, Member
from gradwire.sync.graph import Task, TaskGraph
from gradwire.sync.job import Chunk, EncodedChunk, TensorJob
from gradwire.sync.nodes import grouped
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.strategies import STRATEGIES, Builder, Runtime, peer_strategies
from gradwire.wire.frame import FrameFlags, FrameKind, Header

_KINDS = {"send": SEND, "recv": RECV}
_NOTHING = np.empty(0, dtype=np.uint8)


class FusionMember(NamedTuple):
    """A tensor of a compressed fusion group.

    Attributes:
        numel: Number of elements.
        fusion_index: Index among all tensors that are fused, as in `fusion.Member`.
    """

    numel: int
    fusion_index: int


class Work(NamedTuple):
    """What one task does, whatever its peer and chunk. Tasks of equal work cost the same.

    Attributes:
        call: Method of the codec, or ``"send"``, ``"recv"`` or ``"hand"``.
        frame: Kind of the frame that it makes, sends or receives, if any.
        taken: Kind of its input messages, if any.
        num_messages: Number of input messages.
        sizes: Elements of each tensor in the chunk: one, except in a fusion group.
        encodes_own: Whether a merge encodes the rank's own gradient before it adds it.
        phase: Name in traces.
        share: Share of the frame, if it travels in fragments.
        dense: Whether the frame is dense whatever the job's compressor, as within a node.
        accumulator_bytes: Bytes of one element of an accumulator; 0 for other frames.
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
    """The task graph of one job on one rank.

    Attributes:
        works: Distinct work of its tasks.
        work: Index into `works` (N).
        kind: COMPUTE, SEND or RECV (N).
        pending: Number of predecessors (N).
        successors_at: First successor of each task, as an index into `successors` (N + 1).
        successors: Successors of all tasks (S).
        peer: Peer of a send or recv; -1 for other tasks (N).
        chunk: Index of the chunk (N).
        stage: Stage of the encode or frame; 0 for other tasks (N).
    """

    works: list[Work]
    work: np.ndarray
    kind: np.ndarray
    pending: np.ndarray
    successors_at: np.ndarray
    successors: np.ndarray
    peer: np.ndarray
    chunk: np.ndarray
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
    """Record the graph that a rank runs for one job.

    Args:
        entry: Plan entry of the job.
        numel: Number of elements.
        rank: Rank that runs the graph.
        world_size: Number of ranks.
        tensor: Index of the tensor in the agreed order of names.
        ranks_per_node: Ranks of a node, for hierarchical strategies.
        members: Tensors of a compressed fusion group.

    Raises:
        UnknownNameError: The strategy needs a server.
    """
    if entry.strategy not in peer_strategies():
        raise UnknownNameError("strategy between ranks", entry.strategy, peer_strategies())
    graph = TaskGraph("job", 0, 0, lambda: None)
    job = _job(entry, numel, tensor, members)
    recorder = _Recorder(job, rank, world_size)
    builder = _DryBuilder(job, graph, recorder, ranks_per_node)
    STRATEGIES[entry.strategy].build(builder)
    indices: dict[Work, int] = {}
    work, chunks, stages = [], [], []
    for task in graph.tasks:
        if task.key is not None:
            key = task.key
            task.value = EncodedChunk(key.kind, FrameFlags.PRESENT | FrameFlags.USED, _NOTHING, key.peer)
            sizes = builder.sizes[task]
            found = Work(
                *("recv", key.kind, None, 0, sizes, False, task.phase),
                dense=task in builder.dense_recvs,
                accumulator_bytes=recorder.accumulator_bytes(key.kind, key.stage),
            )
            chunk, stage = key.partition, key.stage
        else:
            assert task.run is not None, f"{task.phase} has nothing to run"
            task.value = task.run()
            found = recorder.last._replace(phase=task.phase)
            chunk, stage = recorder.chunk, recorder.stage
        work.append(indices.setdefault(found, len(indices)))
        chunks.append(chunk)
        stages.append(stage)
    return _packed(graph, list(indices), work, chunks, stages)


def _job(entry: PlanEntry, numel: int, tensor: int, members: Sequence[FusionMember]) -> TensorJob | FusionGroup:
    if not members:
        return TensorJob("job", tensor, torch.empty(numel, device="meta"), entry, 0, 0)
    layout = FusionLayout(
        [Member(i, "job", tensor, 0, each.numel, None, each.fusion_index) for i, each in enumerate(members)],
        entry,
        torch.float32,
    )
    tensors = [torch.empty(member.numel, device="meta") for member in members]
    return FusionGroup(layout, tensors, [True] * len(members), 0, 0)


def _packed(
    graph: TaskGraph, works: list[Work], work: list[int], chunks: list[int], stages: list[int]
) -> RecordedGraph:
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
        np.array(chunks, np.int64),
        np.array(stages, np.int64),
    )


class _Recorder:
    """Stands in for the transport, and records what the latest task did."""

    epoch = 0

    def __init__(self, job: TensorJob | FusionGroup, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.last = Work("", None, None, 0, (), False, "")
        self._job = job
        self.chunk = self.stage = 0

    def send(self, peer: int, header: Header, body: np.ndarray) -> None:
        sizes = self.sizes(Chunk(header.partition, 0, header.count))
        dense, accumulator_bytes = header.compressor == code("none"), self.accumulator_bytes(header.kind, header.stage)
        self.last = Work(
            "send", header.kind, None, 0, sizes, False, "", dense=dense, accumulator_bytes=accumulator_bytes
        )
        self.chunk, self.stage = header.partition, header.stage

    def accumulator_bytes(self, kind: FrameKind, stage: int) -> int:
        """Bytes per element of the accumulators that a stage sends; 0 for other frames."""
        is_sum = kind is FrameKind.AGGREGATE
        return self._job.entry.accumulator_dtype(stage, self.world_size).itemsize if is_sum else 0

    def sizes(self, chunk: Chunk) -> tuple[int, ...]:
        """Elements of each tensor in a chunk."""
        if isinstance(self._job, FusionGroup):
            return tuple(self._job.layout.members[index].count for index in self._job.members_of(chunk))
        return (chunk.count,)


class _DryCodec:
    """Stands in for the codec: records each call and returns an empty message.

    Args:
        real: Codec of the job, asked for the kind of frame that a stage sends.
        recorder: Recorder of the calls.
    """

    def __init__(self, real: Any, recorder: _Recorder) -> None:
        self._real = real
        self._recorder = recorder

    @property
    def first_stage(self) -> int:
        return cast(int, self._real.first_stage)

    def kind(self, stage: int) -> FrameKind:
        return cast(FrameKind, self._real.kind(stage))

    def encodes_own(self, stage: int) -> bool:
        return cast(bool, self._real.encodes_own(stage))

    def start(self, chunk: Chunk) -> EncodedChunk:
        return self._record("start", chunk, 0, (), self.kind(0))

    def merge(self, chunk: Chunk, messages: Sequence[EncodedChunk], stage: int) -> EncodedChunk:
        return self._record("merge", chunk, stage, messages, self.kind(stage), self.encodes_own(stage))

    def decode(self, chunk: Chunk, message: EncodedChunk, stage: int) -> None:
        self._record("decode", chunk, stage, [message], None)

    def decode_sum(self, chunk: Chunk, messages: Sequence[EncodedChunk]) -> None:
        self._record("decode_sum", chunk, 0, messages, None)

    def stats(self, chunk: Chunk, encoded: bool = True) -> EncodedChunk:
        return self._record("stats", chunk, 0, (), FrameKind.STATS)

    def reduce_stats(self, chunk: Chunk, messages: Sequence[EncodedChunk]) -> None:
        self._record("reduce_stats", chunk, 0, messages, None)

    def encode_from(self, stage: int, num_encoders: int) -> None:
        self._real.encode_from(stage, num_encoders)

    def encode_dense(self, chunk: Chunk) -> EncodedChunk:
        return self._record("encode_dense", chunk, 0, (), FrameKind.PAYLOAD)

    def merge_dense(self, chunk: Chunk, messages: Sequence[EncodedChunk]) -> None:
        self._record("merge_dense", chunk, 0, messages, None)

    def encode_mean(self, chunk: Chunk, mean: EncodedChunk) -> EncodedChunk:
        return self._record("encode_mean", chunk, 0, [mean], FrameKind.PAYLOAD)

    def decode_dense(self, chunk: Chunk, message: EncodedChunk) -> None:
        self._record("decode_dense", chunk, 0, [message], None)

    def _record(
        self,
        call: str,
        chunk: Chunk,
        stage: int,
        messages: Sequence[EncodedChunk],
        frame: FrameKind | None,
        encodes_own: bool = False,
    ) -> EncodedChunk:
        taken = messages[0].kind if messages else None
        self._recorder.last = Work(call, frame, taken, len(messages), self._recorder.sizes(chunk), encodes_own, "")
        self._recorder.chunk, self._recorder.stage = chunk.index, stage
        return EncodedChunk(
            frame or FrameKind.PAYLOAD, FrameFlags.PRESENT | FrameFlags.USED, _NOTHING, self._recorder.rank
        )


class _DryBuilder(Builder):
    """The synchronizer's builder over a codec and a transport that only record."""

    def __init__(
        self, job: TensorJob | FusionGroup, graph: TaskGraph, recorder: _Recorder, ranks_per_node: int
    ) -> None:
        nodes = grouped([str(rank // ranks_per_node) for rank in range(recorder.world_size)])
        super().__init__(job, graph, Runtime(cast(Any, recorder), Residuals(), EventStream(), 0, lambda: nodes))
        self._codec = cast(Any, _DryCodec(self._codec, recorder))
        self._recorder = recorder
        self.sizes: dict[Task, tuple[int, ...]] = {}  # elements of the tensors that each recv waits for
        self.dense_recvs: set[Task] = set()

    def recv_dense(self, peer: int, chunk: Chunk, stage: int, phase: str) -> Task:
        task = super().recv_dense(peer, chunk, stage, phase)
        self.dense_recvs.add(task)
        return task

    def _recv(self, peer: int, kind: FrameKind, chunk: Chunk, stage: int, phase: str) -> Task:
        task = super()._recv(peer, kind, chunk, stage, phase)
        self.sizes[task] = self._recorder.sizes(chunk)
        return task
