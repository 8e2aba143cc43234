"""`concat` and `extract`: named values to a payload, and back.

A payload holds first its scalars, float32 in little-endian order, then its arrays by decreasing element width, packed
as described in `gradwire.lang.types`. The receiver knows the tensor, from which lengths follow. A payload with lists
has their length, uint32, after the scalars, and their positions at the end, in the format of
`gradwire.kernels.reference.positions`.

Source: HiPress (Bai et al. 2021), table 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gradwire.lang.ir import FLOAT, Dtype, Node, Space
from gradwire.lang.operators.base import Operator, register


class GradientOperator(Operator):
    """The gradient to encode: scaled and, with error feedback, compensated."""

    name: ClassVar[str] = "gradient"
    is_collective: ClassVar[bool] = False

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        return Space("elements"), FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        return env.gradient


class Extract(Operator):
    """A field of the payload. Attributes: `field`, its name; `space` and `dtype` in the encoder."""

    name: ClassVar[str] = "extract"

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        return attrs["space"], attrs["dtype"]

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        return env.fields[node.attrs["field"]]


for _operator in (GradientOperator(), Extract()):
    register(_operator)
