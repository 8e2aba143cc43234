"""`over_ranks`: a scalar reduced over all ranks before encoding, in the preliminary round.

Without such a round, as in a test or a benchmark of one rank, the rank's own value is used and sent in the payload.

Source: TernGrad (Wen et al. 2017), section 3.3, scaler sharing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gradwire.lang.ir import FLOAT, SCALAR, Dtype, Node, Space
from gradwire.lang.operators.base import FitError, Operator, register


class OverRanks(Operator):
    """Input: a scalar. Attribute: `function`, min, max or sum."""

    name: ClassVar[str] = "over_ranks"

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        if inputs[0].space != SCALAR:
            raise FitError(f"only scalars are reduced over ranks, not {inputs[0].space}", "reduce first")
        if attrs["function"] not in ("min", "max", "sum"):
            raise FitError(f"ranks are reduced with min, max or sum, not {attrs['function']}", "choose one of these")
        return SCALAR, FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        return inputs[0]


register(OverRanks())
