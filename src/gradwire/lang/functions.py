"""The functions of the language: what an algorithm may call on symbolic values, besides their methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradwire.lang.errors import TraceError
from gradwire.lang.graph import graph, user_location
from gradwire.lang.ir import BOOL, Field
from gradwire.lang.operators.base import Coding, lookup
from gradwire.lang.payload import SymbolicPayload
from gradwire.lang.symbols import Value, apply, lift
from gradwire.lang.types import TYPES, ElementType


def uint(bits: int) -> ElementType:
    """The unsigned type of 1, 2, 4 or 8 bits.

    Raises:
        TraceError: there is no such type.
    """
    widths = (1, 2, 4, 8)
    if bits not in widths:
        wider = [width for width in widths if isinstance(bits, (int, float)) and width > bits]
        raise TraceError(
            f"There is no uint({bits!r}): unsigned types have 1, 2, 4 or 8 bits", user_location(),
            f"take the next larger one, uint({wider[0]})" if wider else "take one of these, or int32 for larger values",
        )  # fmt: skip
    return TYPES[f"uint{int(bits)}"]


def where(condition: Any, a: Any, b: Any) -> Value:
    """A where the condition holds, else b: the conditional of the language."""
    return apply("where", condition, a, b)


def floor(x: Any) -> Value:
    """The largest integer that is not above x."""
    return apply("floor", x)


def ceil(x: Any) -> Value:
    """The smallest integer that is not below x."""
    return apply("ceil", x)


def round_even(x: Any) -> Value:
    """The nearest integer; the even one of two."""
    return apply("round_even", x)


def sqrt(x: Any) -> Value:
    """The square root."""
    return apply("sqrt", x)


def step() -> Value:
    """The number of the synchronization step, from 0, the same on all ranks: for what changes while training."""
    return Value(graph().add("step", ()))


def previous_state() -> Value:
    """Value that `next_state` of the compressor returned in an earlier step, 0 at first. For encoders only."""
    return Value(graph().add("previous_state", ()))


def minimum(a: Any, b: Any) -> Value:
    """The smaller of two."""
    return apply("minimum", a, b)


def maximum(a: Any, b: Any) -> Value:
    """The larger of two."""
    return apply("maximum", a, b)


def sign(x: Any) -> Value:
    """-1, 0 or 1."""
    return where(x > 0, 1.0, where(x < 0, -1.0, 0.0))


def exponent(x: Any) -> Value:
    """The biased exponent of x as a float32, 0 to 255: |x| is at least `power(exponent(x))`, and below twice that."""
    return apply("exponent", x)


def power(e: Any) -> Value:
    """The power of two with this biased exponent; 0 for 0."""
    return apply("power", e)


def random(low: Any = 0.0, high: Any = 1.0, *, shared: bool = False) -> Value:
    """A number for each element, drawn evenly from low to high, ends excluded, anew each step.

    It is one of 65,536 equidistant ones, so that a rounding that uses it is unbiased to 2^-17 of a step.

    Args:
        low, high: the range.
        shared: the same on all ranks; else each rank draws its own. A decoder's first such call draws what the
            encoder's first drew, its second what the second drew.
    """
    here = graph()
    shared = bool(shared)
    unit = Value(here.add("random", (), shared=shared, stream=here.num_random[shared]))
    here.num_random[shared] += 1
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        if (low, high) == (0, 1):
            return unit
        return apply("add", unit * float(high - low), low)
    return apply("add", unit * (lift(high) - low), low)


def concat(*unnamed: Any, **fields: Any) -> SymbolicPayload:
    """The payload: values by name. Scalars travel as float32, arrays as the type they were mapped to.

    One array of trits may be given as `q.zero_runs()`: it is the last, and the payload as long as it comes out.
    """
    if unnamed or not fields or "size" in fields:
        got = "values without" if unnamed else "'size', which is the gradient's" if fields else "none"
        raise TraceError(
            f"Expected names for what is sent, got {got}", user_location(), "concat(scale=scale, q=q)"
        )  # fmt: skip
    here = graph()
    made = []
    for name, value in fields.items():
        node = lift(value).node
        if node.dtype == BOOL:
            raise TraceError(
                f"Expected numbers to send as {name!r}, got conditions", user_location(),
                "map(..., dtype=uint1) of elements, where(condition, 1.0, 0.0) of a scalar",
            )  # fmt: skip
        if node.space.kind in ("scalar", "static"):
            node = node if node.op == "narrow" else here.add("narrow", (node,))
        is_coded = isinstance(lookup(node.op), Coding)
        made.append(Field(name, node.inputs[0], coding=node) if is_coded else Field(name, node))

    def place(field: Field) -> tuple[bool, float]:
        return field.coding is not None or field.is_positions, -field.dtype.bits if field.is_array else -1000.0

    return SymbolicPayload(tuple(sorted(made, key=place)))


def _only_in_reduce(name: str) -> Callable[..., Any]:
    def function(*_: object) -> Any:
        raise TraceError(f"{name} is a function for reduce", user_location(), f"x.reduce({name})")

    function.__name__ = name
    return function


mean, norm, count = map(_only_in_reduce, ("mean", "norm", "count"))
