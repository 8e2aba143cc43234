"""Which values are finite: upper bounds of decoded elements, from the scalars of a payload, and the gradient's own.

Decoders clamp their result to finite floats, which takes four operations per element. The scalars of most payloads rule
out an overflow. This module expresses the largest magnitude of each intermediate result in terms of the scalars, so
that generated code decides once per payload whether to clamp.
"""

from __future__ import annotations

from collections.abc import Callable

from gradwire.lang.ir import BOOL, Node, closure
from gradwire.lang.operators.base import lookup
from gradwire.lang.types import ElementType

Leaf = Callable[[Node], str | None]
_SELECTING = ("filter", "top", "hash", "value", "sample", "sort", "abs")
"""Operators that return values of their first input, up to signs."""


def is_finite(node: Node) -> bool:
    """Whether an encoder's values are surely finite: cast, or elements of the gradient, up to signs."""
    if node.op == "gradient" or isinstance(node.dtype, ElementType):
        return True
    return node.op in _SELECTING and is_finite(node.inputs[0])


def overflow_condition(output: Node, leaf: Leaf) -> str | None:
    """Python source of a condition that holds if an element could overflow, or None if none ever can.

    Args:
        output: Decoded node.
        leaf: Returns the source of the largest magnitude, float64, of a scalar or of block values; None if unknown.
    """
    computed = [node for node in closure([output]) if _is_computed(node)]
    bounds = [_bound(node, leaf) for node in computed if node.dtype != BOOL]
    if not bounds:
        return None
    if any(bound is None for bound in bounds):
        return "True"
    largest = bounds[0] if len(bounds) == 1 else f"max({', '.join(str(bound) for bound in bounds)})"
    return f"not {largest} < LARGEST"


def _is_computed(node: Node) -> bool:
    return (
        node.space.kind in ("elements", "items")
        and not lookup(node.op).is_collective
        and node.op not in ("where", "constant", "cast", "index", "value")
    )


def _bound(node: Node, leaf: Leaf) -> str | None:
    if isinstance(node.dtype, ElementType) and node.dtype.is_integer:
        return repr(float(max(-node.dtype.low, node.dtype.high) + 1))  # an int8 may be -128
    if node.op == "constant":
        return repr(abs(float(node.attrs["value"])))
    if node.space.kind in ("static", "scalar", "blocks") and (found := leaf(node)) is not None:
        return found
    if node.op == "random":
        return "1.0"
    numbers = [each for each in node.inputs if each.dtype != BOOL]
    bounds = [_bound(each, leaf) for each in numbers]
    if not bounds or any(bound is None for bound in bounds):
        return None
    return _combined(node, [str(bound) for bound in bounds])


def _combined(node: Node, bounds: list[str]) -> str | None:
    if node.op in ("add", "sub"):
        return f"({bounds[0]} + {bounds[1]})"
    if node.op == "mul":
        return f"({bounds[0]} * {bounds[1]})"
    if node.op == "div" and node.inputs[1].op == "constant":
        return f"({bounds[0]} / {bounds[1]})"
    if node.op in ("where", "minimum", "maximum"):
        return f"max({bounds[0]}, {bounds[1]})"
    if node.op in ("abs", "cast"):
        return bounds[0]
    if node.op in ("floor", "ceil", "round_even", "sqrt"):
        return f"({bounds[0]} + 1.0)"
    return None
