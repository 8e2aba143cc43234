"""User-defined operators: registered, used in an algorithm, with the same bytes as the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from gradwire.core.errors import UnknownNameError
from gradwire.lang import TraceError, apply, ceil, concat, floor, int8, interpret, operators
from gradwire.lang.emit import statics
from gradwire.lang.ir import FLOAT, SCALAR, Dtype, Node, Space
from gradwire.lang.operators import Arithmetic, FitError, Operator, Statement, Text, lookup, register
from gradwire.lang.operators.arithmetic import evaluate_static, static_values
from tests.lang.targets.test_numba import Compiled, environment, gradient
from tests.lang.test_trace import traced


def _clip_vector(x: Text, most: Text) -> str:
    return f"minimum(maximum({x.vector}, {most.vector} * np.float32(-1)), {most.vector})"


def _clip(x: Any, most: Any) -> Any:
    return np.clip(x, -most, most)


register(
    Arithmetic(
        "clip_of_test", 2, _clip, _clip_vector, lambda x, most: f"min(max({x}, -{most}), {most})",
        lambda x, most: f"tl.clamp({x}, -{most}, {most})",
    )
)  # fmt: skip


class Median(Statement):
    """The middle item of a sorted list, the lower of two; 0 of an empty list."""

    name: ClassVar[str] = "median_of_test"

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        if inputs[0].space.kind != "items":
            raise FitError(f"expected a list, not {inputs[0].space}", "sample first")
        return SCALAR, FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> float:
        return float(np.sort(inputs[0])[(inputs[0].size - 1) // 2]) if inputs[0].size else 0.0

    def cpu(self, node: Node, name: str, inputs: Sequence[str]) -> list[str]:
        items, count = inputs[0], f"{inputs[0]}_count"
        return [
            f"{name} = 0.0",
            f"if {count} > 0:",
            f"    {name} = np.float64(np.sort({items}[:{count}])[({count} - 1) // 2])",
        ]


register(Median())


def clipped(g):
    scale = 3 * apply("median_of_test", abs(g).sample(101)) / 127
    q = g.map(lambda x: floor(apply("clip_of_test", x, 100 * scale) / scale), dtype=int8)
    return concat(scale=scale, q=q)


@pytest.mark.parametrize("size", [0, 1, 100, 5000])
def test_operators_of_ones_own_give_the_bytes_of_the_oracle(size: int) -> None:
    program = traced(clipped, lambda p: p.q * p.scale)
    compiled, x = Compiled(program), gradient(size)
    wanted, rest = interpret.encode(program, x, environment(size))
    found, out = np.empty(size, np.float32), np.empty(size, np.float32)
    assert compiled.encode(x, rest=found).tobytes() == wanted.tobytes()
    assert found.tobytes() == rest.tobytes()
    assert compiled.decode(wanted, out)
    assert out.tobytes() == interpret.decode(program, wanted, environment(size)).tobytes()


def test_they_do_what_they_say() -> None:
    x = np.float32([1, -2, 30, -40])
    program = traced(lambda g: concat(m=apply("median_of_test", g.sample(4)), q=apply("clip_of_test", g, 10.0)))
    body, _ = interpret.encode(program, x, environment(4))
    assert body.view(np.float32).tolist() == [-2, 1, -2, 10, -10]


def test_their_refusals_carry_line_and_remedy() -> None:
    with pytest.raises(TraceError, match=r"expected a list, not elements \(in test_operators.py.*Sample first"):
        traced(lambda g: concat(q=g * apply("median_of_test", g)))
    with pytest.raises(TraceError, match="a condition is not a number"):
        traced(lambda g: concat(q=apply("clip_of_test", g > 0, 1.0)))


def test_a_new_definition_of_the_same_class_replaces_the_old() -> None:
    known, again = lookup("median_of_test"), Median()
    assert register(again) is again
    assert lookup("median_of_test") is again
    register(known)


def test_equal_names_of_different_classes_are_refused() -> None:
    class Other(Operator):
        name: ClassVar[str] = "reduce"

        def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
            return SCALAR, FLOAT

        def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
            return 0.0

    with pytest.raises(ValueError, match=r"Operator 'reduce' already exists.*Choose another name"):
        register(Other())
    assert lookup("reduce") is not None
    with pytest.raises(ValueError, match="Operator 'add' already exists"):
        register(Arithmetic("add", 2, np.multiply, lambda a, b: "", lambda a, b: "", lambda a, b: ""))


def test_an_unknown_operator_lists_the_known() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'median_of_test'"):
        lookup("median_of_tests")
    assert "reduce" in operators.names()


def test_known_numbers_are_divided_exactly_and_by_zero_as_floats_are() -> None:
    def encode(g: Any) -> Any:
        kept = g.filter(lambda x: x > 0).top(ceil(0.07 * (g.size / 1024)))
        return concat(index=kept.index, value=kept.value, infinite=1 / (g.size - 1), none=(g.size - 1) / (g.size - 1))

    program = traced(encode, lambda p: p.value.scatter(p.index))
    (top,) = [node for node in program.encode_nodes() if node.op == "top"]
    assert evaluate_static(top.inputs[1], 102_400) == 7
    values = static_values(statics(program), 1)
    assert np.isinf(values).any() and np.isnan(values).any()
