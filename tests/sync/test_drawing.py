"""Graphs as people read them: every task once, every dependency, chunk by chunk."""

from __future__ import annotations

import re
from typing import Any

import pytest

import gradwire as gw
from gradwire.core.errors import OptionError, UnknownNameError
from gradwire.sync import drawing
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.strategies import peer_strategies


@pytest.mark.parametrize("strategy", peer_strategies())
@pytest.mark.parametrize("compressor", ["onebit", "int8shared"])
def test_tables_and_drawings_hold_every_task_and_dependency(strategy: str, compressor: str) -> None:
    graph = drawing.graph_of(PlanEntry(gw.make(compressor), strategy, 2), 4, 1, 2)
    chunks = graph.by_chunk()
    assert [chunk for chunk, _ in chunks] == list(range(2 if strategy == "allgather" else 8))
    for chunk, tasks in chunks:
        assert {task.key.partition for task in tasks if task.key is not None} == {chunk}
    assert sorted(map(id, graph.tasks)) == sorted(id(task) for _, tasks in chunks for task in tasks)
    lines = [line for line in drawing.table(graph).splitlines() if not line.startswith("chunk")]
    edges = {
        (int(before), int(line.split()[0]))
        for line in lines
        if " after " in line
        for before in line.split(" after ")[1].split(", ")
    }
    drawn = {(int(left), int(right)) for left, right in re.findall(r"t(\d+) -> t(\d+);", drawing.dot(graph))}
    expected = {(i, graph.tasks.index(after)) for i, task in enumerate(graph.tasks) for after in task.successors}
    assert edges == drawn == expected
    assert len(lines) == len(graph.tasks) == len(re.findall(r"\[shape=", drawing.dot(graph)))
    assert drawing.dot(graph).count("{") == drawing.dot(graph).count("}")


@pytest.mark.parametrize("change", [{"world_size": 1}, {"rank": 4}, {"rank": -1}, {"ranks_per_node": 0}])
def test_numbers_out_of_range_are_refused_with_advice(change: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="for example: gradwire graph ring --ranks 4 --rank 0"):
        drawing.graph_of(PlanEntry(gw.make("onebit"), "ring"), **({"world_size": 4, "rank": 0} | change))
    with pytest.raises(UnknownNameError, match="Did you mean 'ring'"):
        drawing.graph_of(PlanEntry(gw.make("onebit"), "rings"), 4, 0)
