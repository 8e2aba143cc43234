"""`scatter`: a gradient from a list of positions and values, 0 elsewhere.

Values at the same position add up. A position outside the gradient makes the payload invalid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gradwire.lang.ir import ELEMENTS, FLOAT, Dtype, Node, Space
from gradwire.lang.operators.base import FitError, Operator, register


class Scatter(Operator):
    """Inputs: values, and positions of the same list."""

    name: ClassVar[str] = "scatter"

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        if any(node.space.kind != "items" for node in inputs) or inputs[0].space != inputs[1].space:
            raise FitError(
                "values and positions of one list are needed", "use p.value.scatter(p.index), both of one filter"
            )
        return ELEMENTS, FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        out = np.zeros(env.size, np.float32)
        np.add.at(out, np.asarray(inputs[1], np.int64), np.asarray(inputs[0], np.float32))
        return out


register(Scatter())
