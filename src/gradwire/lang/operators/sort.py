"""`sort(L)`: a sorted list, and `L[k]`, one of its items.

Source: HiPress (Bai et al. 2021), table 4. Differences: only for lists, since no published algorithm needs the whole
gradient sorted, which would take many times longer than everything else. The order is that of numbers; for another
order use map first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gradwire.lang.ir import FLOAT, SCALAR, Dtype, Node, Space
from gradwire.lang.operators.base import FitError, Statement, register


class Sort(Statement):
    """Input: a list of float32 without a NaN. Attribute: `descending`."""

    name: ClassVar[str] = "sort"

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        if inputs[0].space.kind != "items":
            raise FitError(f"expected a list, not {inputs[0].space}", "sample or filter first")
        return Space("items"), FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        ordered = np.sort(np.asarray(inputs[0], np.float32))
        return ordered[::-1] if node.attrs["descending"] else ordered

    def cpu(self, node: Node, name: str, inputs: Sequence[str]) -> list[str]:
        return [
            f"{name} = {inputs[0]}[: {inputs[0]}_count].copy()",
            f"{name}_count = {name}.size",
            f"sort_floats({name}, np.int64({int(node.attrs['descending'])}))",
        ]

    def triton(self, node: Node, name: str, inputs: Sequence[str]) -> list[str]:
        return [f"{name} = sort_floats({inputs[0]}, {node.attrs['descending']})"]


class SortedItem(Statement):
    """Inputs: a list, and a position."""

    name: ClassVar[str] = "item"
    is_collective: ClassVar[bool] = False

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        if inputs[1].space.kind not in ("static", "scalar"):
            raise FitError(f"expected a number for a position, not {inputs[1].space}", "reduce first")
        return SCALAR, FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        items = np.asarray(inputs[0], np.float32)
        if items.size == 0:
            return 0.0
        return float(items[int(min(max(float(inputs[1]), 0.0), items.size - 1.0))])

    def cpu(self, node: Node, name: str, inputs: Sequence[str]) -> list[str]:
        return [f"{name} = item({inputs[0]}, {inputs[0]}_count, np.float64({inputs[1]}))"]

    def triton(self, node: Node, name: str, inputs: Sequence[str]) -> list[str]:
        return [f"{name} = item({inputs[0]}, {inputs[1]})"]


for _operator in (Sort(), SortedItem()):
    register(_operator)
