"""`filter(G, f)`: the elements for which a condition holds, as a list of positions and values.

The list is in the order of elements. `at_most` limits it to the first elements. `index`, `value` and `length` read
the list; `top` keeps its largest magnitudes.

Source: HiPress (Bai et al. 2021), table 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gradwire.lang.ir import FLOAT, SCALAR, Dtype, Node, Space
from gradwire.lang.operators.base import DeviceEmission, Emission, FitError, Operator, Sink, Statement, register

_NEW = Space("items")  # the graph fills in the node itself as the source


@dataclass(frozen=True)
class Pairs:
    """A list in the reference: ascending positions, uint32, and values, float32."""

    index: np.ndarray
    value: np.ndarray


class Filter(Sink):
    """Inputs: values, a mask, and optionally the maximum length."""

    name: ClassVar[str] = "filter"

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        if inputs[0].space.kind != "elements" or inputs[1].space.kind != "elements":
            raise FitError("only elements can be filtered", "filter the gradient once, with & between conditions")
        return _NEW, FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        index = np.flatnonzero(inputs[1]).astype(np.uint32)
        if len(inputs) > 2:
            index = index[: max(0, int(inputs[2]))]
        return Pairs(index, np.asarray(inputs[0], np.float32)[index])

    def cpu(self, node: Node, name: str, value: str, mask: str | None) -> Emission:
        return Emission(
            [
                f"{name}_index = array_at(room, {name}_capacity + SLOTS, u32)",
                f"room += np.uint64(4 * ({name}_capacity + SLOTS))",
                f"{name}_value = array_at(room, {name}_capacity + SLOTS, f32)",
                f"room += np.uint64(4 * ({name}_capacity + SLOTS))",
                f"{name}_scratch = np.zeros(LANES + 1, np.float32)",
                f"{name}_count = np.int64(0)",
            ],
            [],
            [
                f"{name}_count = append({mask}, i, {value}, {name}_scratch, {name}_index, {name}_value, "
                f"{name}_count, {name}_capacity)"
            ],
        )

    def triton(self, node: Node, name: str, value: str, chosen: str) -> DeviceEmission:
        return DeviceEmission(
            {f"{name}_counts": "int32"},
            [f"tl.store({name}_counts + chunk, chunk_count({chosen}))"],
            [
                f"{name}_starts, {name}_count = places({name}_counts, {name}_most)",
                f"{name}_index = empty({name}_count, torch.int32, grad)",
                f"{name}_value = empty({name}_count, torch.float32, grad)",
            ],
            [f"store_chosen({name}_index, {name}_value, {name}_starts, {name}_count, i, {value}, {chosen})"],
            [f"{name}_index", f"{name}_value", f"{name}_starts", f"{name}_count"],
        )


class Top(Statement):
    """Inputs: a list, and the number of items to keep."""

    name: ClassVar[str] = "top"

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        return _NEW, FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        pairs, most = inputs[0], max(0, int(inputs[1]))
        chosen = np.sort(np.argsort(-np.abs(pairs.value), kind="stable")[:most])
        return Pairs(pairs.index[chosen], pairs.value[chosen])

    def cpu(self, node: Node, name: str, inputs: Sequence[str]) -> list[str]:
        source, most = inputs
        return [
            f"{name}_index = {source}_index[: {source}_count + SLOTS].copy()",
            f"{name}_value = {source}_value[: {source}_count + SLOTS].copy()",
            f"{name}_count = keep_top({name}_index, {name}_value, {source}_count, max(np.int64({most}), 0))",
        ]

    def triton(self, node: Node, name: str, inputs: Sequence[str]) -> list[str]:
        source, most = inputs
        return [f"{name}_index, {name}_value = keep_top({source}_index, {source}_value, {most})"]


class _Part(Operator):
    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        return inputs[0].space, FLOAT


class Index(_Part):
    """The positions of a list."""

    name: ClassVar[str] = "index"
    is_collective: ClassVar[bool] = False

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        return inputs[0].index


class ValueOf(_Part):
    """The values of a list."""

    name: ClassVar[str] = "value"
    is_collective: ClassVar[bool] = False

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        return inputs[0].value


class Length(Operator):
    """Number of items of a list, a scalar."""

    name: ClassVar[str] = "length"
    is_collective: ClassVar[bool] = False

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        if inputs[0].space.kind != "items":
            raise FitError(f"expected a list, not {inputs[0].space}", "use .size of the gradient or of a list")
        return SCALAR, FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        items = inputs[0]
        return float(items.value.size if isinstance(items, Pairs) else np.size(items))


for _operator in (Filter(), Top(), Index(), ValueOf(), Length()):
    register(_operator)
