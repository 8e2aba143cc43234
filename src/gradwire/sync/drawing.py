"""The task graph of a strategy on one rank, to be read: as a table, or in Graphviz's language."""

# Shapes: W = ranks, K = partitions.

from __future__ import annotations

import torch

from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.core.events import EventStream
from gradwire.net.memory import MemoryNetwork
from gradwire.residuals.transaction import Residuals
from gradwire.sync.graph import Task, TaskGraph
from gradwire.sync.job import RANGE_ALIGNMENT, TensorJob
from gradwire.sync.nodes import grouped
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.strategies import STRATEGIES, Builder, Runtime, peer_strategies

_SHAPES = {"encode": "box", "merge": "box", "decode": "box", "send": "cds", "recv": "cds"}
_DIRECTION = {"send": "to", "recv": "from"}


def graph_of(entry: PlanEntry, world_size: int, rank: int, ranks_per_node: int = 1, elements: int = 0) -> TaskGraph:
    """The graph that a rank runs for one tensor.

    Args:
        entry: how the tensor travels.
        world_size: ranks in the group.
        rank: whose graph.
        ranks_per_node: for ``"hierarchical"``.
        elements: of the tensor; 0 for as many as give every range some.

    Raises:
        UnknownNameError: a strategy that does not exist.
        OptionError: a rank or a number out of range.
    """
    if entry.strategy not in peer_strategies():
        raise UnknownNameError("strategy", entry.strategy, peer_strategies())
    if world_size < 2 or not 0 <= rank < world_size or min(entry.partitions, ranks_per_node) < 1 or elements < 0:
        raise OptionError(
            f"Expected at least 2 ranks, one of them to draw, and partitions and ranks a node of at least 1, got rank "
            f"{rank} of {world_size}, {entry.partitions} partitions, {ranks_per_node} ranks a node and {elements} "
            "elements. Do: gradwire graph ring --ranks 4 --rank 0."
        )
    numel = elements or world_size * entry.partitions * RANGE_ALIGNMENT
    nodes = grouped([str(each // ranks_per_node) for each in range(world_size)])
    graph = TaskGraph(f"{entry.strategy} of {numel:,} elements", 0, 0, lambda: None)
    with MemoryNetwork(world_size) as network:
        around = Runtime(network.transports[rank], Residuals(), EventStream(), 0, lambda: nodes)
        STRATEGIES[entry.strategy].build(
            Builder(TensorJob("tensor", 0, torch.empty(numel), entry, 0, 0), graph, around)
        )
    return graph


def table(graph: TaskGraph) -> str:
    """A line a task, part by part: number, phase, peer, and the numbers of the tasks it comes after."""
    after = graph.predecessors()
    numbers = {task: number for number, task in enumerate(graph.tasks)}
    lines = []
    for part, tasks in graph.by_part():
        lines.append(f"part {part}")
        for task in tasks:
            behind = ", ".join(str(numbers[each]) for each in after[task])
            cells = f"  {numbers[task]:4}  {task.kind:6}  {task.phase:14}  {_peer(task):12}"
            lines.append(f"{cells}  after {behind}" if behind else cells.rstrip())
    return "\n".join(lines)


def dot(graph: TaskGraph) -> str:
    """The same for Graphviz: ``gradwire graph ring --dot | dot -Tsvg``."""
    numbers = {task: number for number, task in enumerate(graph.tasks)}
    lines = [f'digraph "{graph.name}" {{', "  rankdir=LR; node [fontname=sans, fontsize=10];"]
    for part, tasks in graph.by_part():
        lines.append(f'  subgraph cluster_{part} {{ label="part {part}"; fontname=sans; fontsize=10;')
        for task in tasks:
            label = " ".join([task.phase, _peer(task)]).strip()
            lines.append(f'    t{numbers[task]} [shape={_SHAPES[task.kind]}, label="{label}"];')
        lines.append("  }")
    for task in graph.tasks:
        lines += [f"  t{numbers[task]} -> t{numbers[successor]};" for successor in task.successors]
    return "\n".join([*lines, "}"])


def _peer(task: Task) -> str:
    return "" if task.peer is None else f"{_DIRECTION[task.kind]} rank {task.peer}"
