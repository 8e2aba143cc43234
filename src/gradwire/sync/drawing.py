"""The task graph of a strategy on one rank, as a table or for Graphviz."""

# Shapes: W = ranks, K = partitions.

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch

from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.core.events import EventStream
from gradwire.net.transport import Transport
from gradwire.residuals.transaction import Residuals
from gradwire.sync.graph import Task, TaskGraph
from gradwire.sync.job import RANGE_ALIGNMENT, TensorJob
from gradwire.sync.nodes import grouped
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.strategies import STRATEGIES, Builder, Runtime, peer_strategies

_SHAPES = {"encode": "box", "merge": "box", "decode": "box", "send": "cds", "recv": "cds"}
_DIRECTION = {"send": "to", "recv": "from"}


def graph_of(entry: PlanEntry, world_size: int, rank: int, ranks_per_node: int = 1, elements: int = 0) -> TaskGraph:
    """Return the graph that a rank runs for one tensor.

    Args:
        entry: Plan entry of the tensor.
        world_size: Number of ranks.
        rank: Rank whose graph is returned.
        ranks_per_node: Number of ranks per node, for ``"hierarchical"``.
        elements: Number of elements of the tensor; 0 for the fewest that leave no chunk empty.

    Raises:
        UnknownNameError: No such strategy.
        OptionError: A rank or a number out of range.
    """
    if entry.strategy not in peer_strategies():
        raise UnknownNameError("strategy", entry.strategy, peer_strategies())
    if world_size < 2 or not 0 <= rank < world_size or min(entry.partitions, ranks_per_node) < 1 or elements < 0:
        raise OptionError(
            f"There is no graph of rank {rank} of {world_size} with {entry.partitions} partitions, {ranks_per_node} "
            f"ranks per node and {elements} elements. Pass at least 2 ranks, one of them as the rank, and at least 1 "
            "partition and rank per node, for example: gradwire graph ring --ranks 4 --rank 0."
        )
    numel = elements or world_size * entry.partitions * RANGE_ALIGNMENT
    nodes = grouped([str(each // ranks_per_node) for each in range(world_size)])
    graph = TaskGraph(f"{entry.strategy} of {numel:,} elements", 0, 0, lambda: None)
    transport = cast(Transport, SimpleNamespace(rank=rank, world_size=world_size))  # nothing is sent
    runtime = Runtime(transport, Residuals(), EventStream(), 0, lambda: nodes)
    job = TensorJob("tensor", 0, torch.empty(numel), entry, 0, 0)
    STRATEGIES[entry.strategy].build(Builder(job, graph, runtime))
    return graph


def table(graph: TaskGraph) -> str:
    """Return one line per task, chunk by chunk: number, phase, peer, and the numbers of the tasks before it."""
    after = graph.predecessors()
    numbers = {task: number for number, task in enumerate(graph.tasks)}
    lines = []
    for chunk, tasks in graph.by_chunk():
        lines.append(f"chunk {chunk}")
        for task in tasks:
            before = ", ".join(str(numbers[each]) for each in after[task])
            cells = f"  {numbers[task]:4}  {task.kind:6}  {task.phase:14}  {_peer(task):12}"
            lines.append(f"{cells}  after {before}" if before else cells.rstrip())
    return "\n".join(lines)


def dot(graph: TaskGraph) -> str:
    """Return the graph for Graphviz: ``gradwire graph ring --dot | dot -Tsvg``."""
    numbers = {task: number for number, task in enumerate(graph.tasks)}
    lines = [f'digraph "{graph.name}" {{', "  rankdir=LR; node [fontname=sans, fontsize=10];"]
    for chunk, tasks in graph.by_chunk():
        lines.append(f'  subgraph cluster_{chunk} {{ label="chunk {chunk}"; fontname=sans; fontsize=10;')
        for task in tasks:
            label = " ".join([task.phase, _peer(task)]).strip()
            lines.append(f'    t{numbers[task]} [shape={_SHAPES[task.kind]}, label="{label}"];')
        lines.append("  }")
    for task in graph.tasks:
        lines += [f"  t{numbers[task]} -> t{numbers[successor]};" for successor in task.successors]
    return "\n".join([*lines, "}"])


def _peer(task: Task) -> str:
    return "" if task.peer is None else f"{_DIRECTION[task.kind]} rank {task.peer}"
