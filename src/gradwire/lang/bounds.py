"""How large a decoded element can get, from the scalars of its payload.

A decoder's result is cut to the finite floats, which takes four operations an element. Most payloads cannot overflow:
their scalars tell. This module writes the largest magnitude of every intermediate result as an expression of them, so
that generated code finds out once a payload whether it must look at elements.
"""

from __future__ import annotations

from collections.abc import Callable

from gradwire.lang.ir import BOOL, Node, closure
from gradwire.lang.operators.base import lookup
from gradwire.lang.types import ElementType

Leaf = Callable[[Node], str | None]


def overflow_condition(output: Node, leaf: Leaf) -> str | None:
    """Python source of a condition that holds where an element could overflow; None where none ever can.

    Args:
        output: what is decoded.
        leaf: source of the largest magnitude, a float64, of a scalar or of the values of blocks; None if not known.
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
