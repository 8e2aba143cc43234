"""The operations of a job on one rank, as arrays for the event loop, and what each of them does.

They are those that the synchronizer runs (`gradwire.sync.strategies`), preliminary rounds included. So a simulated job
has the operations, dependencies and frames of a real one, whatever the strategy.
"""

# Shapes: N = operations of a graph, S = pairs of an operation and a successor.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from gradwire.core.errors import UnknownNameError
from gradwire.simulate.loop import COMPUTE, RECV, SEND
from gradwire.sync.chunk import Chunk
from gradwire.sync.fusion import FusionLayout
from gradwire.sync.job import TensorLayout
from gradwire.sync.nodes import grouped
from gradwire.sync.operations import Op, Operations
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.strategies import operations_of, peer_strategies
from gradwire.wire.frame import FrameKind

Shapes = tuple[tuple[int, ...], ...]
"""Shape of each tensor in a chunk."""

CONTRIBUTION, RESULT = "contribution", "result"
_KINDS = {"send": SEND, "recv": RECV}


class FusionMember(NamedTuple):
    """A tensor of a compressed fusion group.

    Attributes:
        shape: Shape of the tensor.
        rotation: Rank that owns it, modulo the number of ranks.
    """

    shape: tuple[int, ...]
    rotation: int


class Work(NamedTuple):
    """What an operation does, whatever its peer and chunk. Operations of equal work cost the same.

    Attributes:
        call: Method of the codec, or ``"send"``, ``"recv"`` or ``"hand"``.
        frame: Kind of the payload that it makes, sends or receives, if any.
        taken: Kind of the payloads that it takes, if any.
        num_payloads: Number of payloads that it takes.
        shapes: Shape of each tensor in the chunk: one, except in a fusion group.
        phase: Name in traces.
        share: Share of the frame, if it travels in fragments.
        dense: Whether the frame is dense whatever the job's compressor, as within a node.
        whole: Whether it is about all chunks of a fusion group, as in a preliminary round.
        accumulator_bytes: Bytes of one element of an accumulator in a frame; 0 for other frames.
        owners: Number of owners, if it is about lists of pairs by owner; 0 for other strategies.
        packets: CONTRIBUTION or RESULT, if it sends or receives packets of an aggregation server.
    """

    call: str
    frame: FrameKind | None
    taken: FrameKind | None
    num_payloads: int
    shapes: Shapes
    phase: str
    share: float = 1.0
    dense: bool = False
    whole: bool = False
    accumulator_bytes: int = 0
    owners: int = 0
    packets: str = ""


class RankGraph(NamedTuple):
    """The operations of one job on one rank.

    Attributes:
        works: Distinct work of its operations.
        work: Index into `works` (N).
        kind: COMPUTE, SEND or RECV (N).
        pending: Number of predecessors (N).
        successors_at: First successor of each operation, as an index into `successors` (N + 1).
        successors: Successors of all operations (S).
        peer: Peer of a send or recv; -1 for other operations (N).
        chunk: Index of the chunk; -1 for all chunks of a fusion group (N).
        stage: Stage of the encode or frame (N).
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


def graph_of(
    entry: PlanEntry,
    shape: tuple[int, ...],
    rank: int,
    world_size: int,
    *,
    rotation: int = 0,
    ranks_per_node: int = 1,
    members: Sequence[FusionMember] = (),
) -> RankGraph:
    """Return the operations of a rank for one job.

    Args:
        entry: Plan entry of the job.
        shape: Shape of the tensor.
        rank: Rank that runs them.
        world_size: Number of ranks.
        rotation: Rank that owns the first range, modulo the number of ranks.
        ranks_per_node: Ranks of a node, for hierarchical strategies.
        members: Tensors of a compressed fusion group.

    Raises:
        UnknownNameError: The strategy needs a server: see `gradwire.simulate.served`.
    """
    if entry.strategy not in peer_strategies():
        raise UnknownNameError("strategy between ranks", entry.strategy, peer_strategies())
    layout: TensorLayout | FusionLayout = layout_of(entry, shape, rotation)
    if members:
        layout = FusionLayout([layout_of(entry, *member) for member in members])
    nodes = grouped([str(each // ranks_per_node) for each in range(world_size)])
    return _packed(operations_of(layout, rank, world_size, lambda: nodes), layout, world_size)


def layout_of(entry: PlanEntry, shape: tuple[int, ...], rotation: int) -> TensorLayout:
    """A tensor of a job, whatever its name."""
    return TensorLayout("job", 0, entry, torch.float32, math.prod(shape), shape=shape, rotation=rotation)


def _packed(operations: Operations, layout: TensorLayout | FusionLayout, world_size: int) -> RankGraph:
    ops, indices = operations.ops, dict[Work, int]()
    work = [indices.setdefault(work_of(op, ops, layout, world_size), len(indices)) for op in ops]
    return RankGraph(
        list(indices),
        np.array(work, np.int64),
        np.array([_KINDS.get(op.kind, COMPUTE) for op in ops], np.int64),
        np.array([0 if op.kind == "recv" else count for op, count in zip(ops, operations.pending)], np.int64),
        np.cumsum([0, *map(len, operations.successors)], dtype=np.int64),
        np.array([each for successors in operations.successors for each in successors], np.int64),
        np.array([-1 if op.peer is None else op.peer for op in ops], np.int64),
        np.array([-1 if _is_whole(op, layout) else op.chunk.index for op in ops], np.int64),
        np.array([op.stage for op in ops], np.int64),
    )


def work_of(op: Op, ops: Sequence[Op], layout: TensorLayout | FusionLayout, world_size: int) -> Work:
    """What an operation does."""
    shapes, whole = _shapes(layout, op.chunk), _is_whole(op, layout)
    owners = world_size if layout.entry.strategy == "sparse_reduce" else 0
    if op.call:
        taken = ops[op.inputs[0]].frame if op.inputs else None
        return Work(op.call, op.frame, taken, len(op.inputs), shapes, op.phase, whole=whole, owners=owners)
    is_sum = op.frame is FrameKind.AGGREGATE and not owners
    accumulator_bytes = layout.entry.accumulator_dtype(op.stage, world_size).itemsize if is_sum else 0
    return Work(
        *(op.kind, op.frame, None, 0, shapes, op.phase),
        dense=op.dense,
        whole=whole,
        accumulator_bytes=accumulator_bytes,
        owners=owners,
    )


def _is_whole(op: Op, layout: TensorLayout | FusionLayout) -> bool:
    return isinstance(layout, FusionLayout) and op.chunk == layout.whole


def _shapes(layout: TensorLayout | FusionLayout, chunk: Chunk) -> Shapes:
    """Shape of each tensor in a chunk."""
    if isinstance(layout, FusionLayout):
        members = [layout.members[index] for index in layout.members_of_chunk[chunk.index]]
        return tuple(member.spec(Chunk(0, 0, member.count)).shape for member in members)
    return (layout.spec(chunk).shape,)
