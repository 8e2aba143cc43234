"""Operations as people read them: every operation once, every dependency, chunk by chunk."""

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
def test_tables_and_drawings_hold_every_operation_and_dependency(strategy: str, compressor: str) -> None:
    operations = drawing.operations_of_rank(PlanEntry(gw.make(compressor), strategy, 3), 4, 1, 2)
    text, picture = drawing.table(operations), drawing.dot(operations, "title")
    chunks = [line for line in text.splitlines() if line.startswith("chunk")]
    assert chunks == [f"chunk {index}" for index in range(3)]
    lines = [line for line in text.splitlines() if not line.startswith("chunk")]
    edges = {
        (int(before), int(line.split()[0]))
        for line in lines
        if " after " in line
        for before in line.split(" after ")[1].split(", ")
    }
    drawn = {(int(left), int(right)) for left, right in re.findall(r"t(\d+) -> t(\d+);", picture)}
    expected = {(index, after) for index, successors in enumerate(operations.successors) for after in successors}
    assert edges == drawn == expected
    assert sorted(int(line.split()[0]) for line in lines) == list(range(len(operations.ops)))
    assert len(lines) == len(re.findall(r"\[shape=", picture))
    assert picture.count("{") == picture.count("}")


@pytest.mark.parametrize("change", [{"world_size": 1}, {"rank": 4}, {"rank": -1}, {"ranks_per_node": 0}])
def test_numbers_out_of_range_are_refused_with_advice(change: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="for example: gradwire graph ring --ranks 4 --rank 0"):
        drawing.operations_of_rank(PlanEntry(gw.make("onebit"), "ring"), **({"world_size": 4, "rank": 0} | change))
    with pytest.raises(UnknownNameError, match="Did you mean 'ring'"):
        drawing.operations_of_rank(PlanEntry(gw.make("onebit"), "rings"), 4, 0)
