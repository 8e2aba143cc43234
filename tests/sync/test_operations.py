"""Operations as data: counts and order."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

import gradwire as gw
from gradwire.sync.chunk import Chunk
from gradwire.sync.drawing import operations_of_rank
from gradwire.sync.job import TensorLayout
from gradwire.sync.nodes import grouped
from gradwire.sync.operations import Draft, FrameFields, FrameKey, Operations, predecessors
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.strategies import operations_of, peer_strategies
from gradwire.wire.frame import FrameKind

CHUNK = Chunk(0, 0, 8)


def diamond() -> Operations:
    draft = Draft()
    first = draft.add("encode", "start", "encode own", CHUNK)
    received = draft.recv_frame(2, FrameKind.PAYLOAD, CHUNK, 1, "recv gather")
    draft.send_frame(first, 1, FrameKind.PAYLOAD, CHUNK, 0, "send own")
    both = draft.add("merge", "merge", "merge both", CHUNK, [first, received], [first])
    draft.add("decode", "decode", "decode", CHUNK, [both], [first])
    return Operations(draft.ops, FrameFields(tensor=7, offset=40))


def test_an_operation_counts_what_it_waits_for_and_knows_what_follows() -> None:
    operations = diamond()
    assert operations.pending == [0, 1, 1, 2, 2], "a recv waits for its frame"
    assert operations.successors == [(2, 3, 4), (3,), (), (4,), ()]
    assert operations.num_users == [2, 1, 0, 1, 0]
    assert operations.roots == [0]
    assert operations.recvs == {FrameKey(2, FrameKind.PAYLOAD, 1, 7, 0, 0, offset=40, numel=8): 1}
    assert operations.senders == {2}


def test_a_frame_that_two_operations_wait_for_is_refused() -> None:
    draft = Draft()
    for _ in range(2):
        draft.recv_frame(2, FrameKind.PAYLOAD, CHUNK, 1, "recv")
    with pytest.raises(AssertionError, match="each frame has one recv"):
        Operations(draft.ops, FrameFields(0))


@pytest.mark.parametrize("strategy", peer_strategies())
@pytest.mark.parametrize("compressor", ["none", "onebit", "int8shared", "terngrad", "topk"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_every_frame_that_a_rank_sends_is_one_that_its_peer_receives(
    strategy: str, compressor: str, world_size: int
) -> None:
    for partitions, rotation in itertools.product([None, *range(1, 3 * world_size + 2)], range(world_size)):
        entry = PlanEntry(gw.make(compressor), strategy, partitions)
        _check_frames(TensorLayout("w", 0, entry, torch.float32, 20_000, rotation=rotation), world_size)


def _check_frames(layout: TensorLayout, world_size: int) -> None:
    ranks, nodes = range(world_size), grouped([str(rank // 2) for rank in range(world_size)])
    everyone = [operations_of(layout, rank, world_size, lambda: nodes) for rank in ranks]
    sent = [
        (rank, op.peer, op.frame, op.stage, op.chunk, op.dense)
        for rank, operations in enumerate(everyone)
        for op in operations.ops
        if op.kind == "send"
    ]
    received = [
        (op.peer, rank, op.frame, op.stage, op.chunk, op.dense)
        for rank, operations in enumerate(everyone)
        for op in operations.ops
        if op.kind == "recv"
    ]
    assert len(sent) == len(set(sent))
    assert set(sent) == set(received)
    decoded = [[op.chunk for op in operations.ops if op.phase.startswith("decode")] for operations in everyone]
    for chunks in decoded:
        assert sum(chunk.count for chunk in set(chunks)) == layout.count, "each rank gets all means"


@pytest.mark.parametrize("strategy", ["scatter_reduce", "ring", "hierarchical"])
@pytest.mark.parametrize("partitions", [1, 2, 3, 5, 8, None])
def test_over_as_many_tensors_as_ranks_each_rank_does_as_much(strategy: str, partitions: int | None) -> None:
    """Owners rotate: over all tensors, each rank merges and sends as many chunks."""
    entry, world_size = PlanEntry(gw.make("onebit"), strategy, partitions), 4
    nodes = grouped([str(rank // 2) for rank in range(world_size)])
    counts = [Counter[str]() for _ in range(world_size)]
    for rotation in range(world_size):
        layout = TensorLayout("w", 0, entry, torch.float32, 64 * 1024, rotation=rotation)
        for rank, count in enumerate(counts):
            count.update(op.phase for op in operations_of(layout, rank, world_size, lambda: nodes).ops)
    assert all(count == counts[0] for count in counts[1:])


@pytest.mark.parametrize("strategy", peer_strategies())
def test_operations_come_after_all_that_they_wait_for(strategy: str) -> None:
    for rank in range(4):
        for index, op in enumerate(operations_of_rank(PlanEntry(gw.make("onebit"), strategy), 4, rank, 2).ops):
            assert all(before < index for before in predecessors(op))
