"""The operations of a strategy on one rank, as a table or for Graphviz."""

# Shapes: W = ranks, K = partitions.

from __future__ import annotations

from collections import defaultdict

import torch

from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.sync.job import TensorLayout
from gradwire.sync.nodes import grouped
from gradwire.sync.operations import Op, Operations, predecessors
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.strategies import operations_of, peer_strategies

_SHAPES = {"encode": "box", "merge": "box", "decode": "box", "send": "cds", "recv": "cds"}
_DIRECTION = {"send": "to", "recv": "from"}


def operations_of_rank(
    entry: PlanEntry, world_size: int, rank: int, ranks_per_node: int = 1, elements: int = 0
) -> Operations:
    """Return the operations of a rank for one tensor.

    Args:
        entry: Plan entry of the tensor.
        world_size: Number of ranks.
        rank: Rank whose operations are returned.
        ranks_per_node: Number of ranks per node, for ``"hierarchical"``.
        elements: Number of elements of the tensor; 0 for the fewest that leave no chunk empty.

    Raises:
        UnknownNameError: No such strategy.
        OptionError: A rank or a number out of range.
    """
    if entry.strategy not in peer_strategies():
        raise UnknownNameError("strategy", entry.strategy, peer_strategies())
    num_ranges = entry.num_ranges(0, world_size)
    if world_size < 2 or not 0 <= rank < world_size or min(num_ranges, ranks_per_node) < 1 or elements < 0:
        raise OptionError(
            f"There is no graph of rank {rank} of {world_size} with {num_ranges} partitions, {ranks_per_node} "
            f"ranks per node and {elements} elements. Pass at least 2 ranks, one of them as the rank, and at least 1 "
            "partition and rank per node, for example: gradwire graph ring --ranks 4 --rank 0."
        )
    numel = elements or num_ranges * entry.range_alignment
    nodes = grouped([str(each // ranks_per_node) for each in range(world_size)])
    return operations_of(TensorLayout("tensor", 0, entry, torch.float32, numel), rank, world_size, lambda: nodes)


def table(operations: Operations) -> str:
    """Return one line per operation, chunk by chunk: number, phase, peer, and the numbers of those before it."""
    lines = []
    for chunk, members in _by_chunk(operations):
        lines.append(f"chunk {chunk}")
        for number in members:
            op = operations.ops[number]
            before = ", ".join(map(str, sorted(predecessors(op))))
            cells = f"  {number:4}  {op.kind:6}  {op.phase:14}  {_peer(op):12}"
            lines.append(f"{cells}  after {before}" if before else cells.rstrip())
    return "\n".join(lines)


def dot(operations: Operations, title: str) -> str:
    """Return the operations for Graphviz: ``gradwire graph ring --dot | dot -Tsvg``."""
    lines = [f'digraph "{title}" {{', "  rankdir=LR; node [fontname=sans, fontsize=10];"]
    for chunk, members in _by_chunk(operations):
        lines.append(f'  subgraph cluster_{chunk} {{ label="chunk {chunk}"; fontname=sans; fontsize=10;')
        for number in members:
            op = operations.ops[number]
            label = " ".join([op.phase, _peer(op)]).strip()
            lines.append(f'    t{number} [shape={_SHAPES[op.kind]}, label="{label}"];')
        lines.append("  }")
    for number, successors in enumerate(operations.successors):
        lines += [f"  t{number} -> t{successor};" for successor in successors]
    return "\n".join([*lines, "}"])


def _by_chunk(operations: Operations) -> list[tuple[int, list[int]]]:
    """Return the operations of each chunk."""
    chunks: dict[int, list[int]] = defaultdict(list)
    for number, op in enumerate(operations.ops):
        chunks[op.chunk.index].append(number)
    return sorted(chunks.items())


def _peer(op: Op) -> str:
    return "" if op.peer is None else f"{_DIRECTION[op.kind]} rank {op.peer}"
