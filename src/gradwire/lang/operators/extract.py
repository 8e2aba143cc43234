"""`concat` and `extract`: named values to a payload, and back.

A payload holds its scalars first, as float32 in little-endian order, then its arrays by falling width of their
elements, each packed as `gradwire.lang.types` says. Lengths follow from the receiver's own knowledge of the tensor;
where there are lists, their length stands after the scalars, as a uint32, and their positions come last, in the format
of `gradwire.kernels.reference.positions`.

Source: HiPress (Bai et al. 2021), table 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gradwire.lang.ir import FLOAT, Dtype, Node, Space
from gradwire.lang.operators.base import Operator, register


class GradientOperator(Operator):
    """The gradient that is encoded: scaled, and compensated where there is feedback."""

    name: ClassVar[str] = "gradient"
    is_collective: ClassVar[bool] = False

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        return Space("elements"), FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        return env.gradient


class Extract(Operator):
    """A field of the payload. Attributes: `field`, its name, and `space` and `dtype` as it was sent."""

    name: ClassVar[str] = "extract"

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        return attrs["space"], attrs["dtype"]

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        return env.fields[node.attrs["field"]]


for _operator in (GradientOperator(), Extract()):
    register(_operator)
