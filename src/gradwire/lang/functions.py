"""The functions of the language, which an algorithm may call on symbolic values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradwire.lang.bounds import is_finite
from gradwire.lang.errors import TraceError
from gradwire.lang.graph import graph, user_location
from gradwire.lang.ir import BOOL, FLOAT, Field
from gradwire.lang.operators.base import Coding, lookup
from gradwire.lang.payload import SymbolicPayload
from gradwire.lang.symbols import Value, apply, lift
from gradwire.lang.types import TYPES, ElementType, float32


def uint(bits: int) -> ElementType:
    """The unsigned type of 1, 2, 4 or 8 bits.

    Raises:
        TraceError: There is no such type.
    """
    widths = (1, 2, 4, 8)
    if bits not in widths:
        wider = [width for width in widths if isinstance(bits, (int, float)) and width > bits]
        raise TraceError(
            f"There is no uint({bits!r}): unsigned types have 1, 2, 4 or 8 bits", user_location(),
            f"use the next larger one, uint({wider[0]})" if wider else "use one of these, or int32 for larger values",
        )  # fmt: skip
    return TYPES[f"uint{int(bits)}"]


def where(condition: Any, a: Any, b: Any) -> Value:
    """A where the condition holds, else b."""
    return apply("where", condition, a, b)


def floor(x: Any) -> Value:
    """The largest integer not above x."""
    return apply("floor", x)


def ceil(x: Any) -> Value:
    """The smallest integer not below x."""
    return apply("ceil", x)


def round_even(x: Any) -> Value:
    """The nearest integer, halves to even."""
    return apply("round_even", x)


def sqrt(x: Any) -> Value:
    """The square root."""
    return apply("sqrt", x)


def step() -> Value:
    """Number of the synchronization step, 1 in the first one, the same on all ranks."""
    return Value(graph().add("step", ()))


def previous_state() -> Value:
    """The value that the compressor's `next_state` returned in the last step, 0 at first. For encoders only."""
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
    """The biased exponent of x as a float32, 0 to 255: `power(exponent(x))` <= |x| < 2 `power(exponent(x))`."""
    return apply("exponent", x)


def power(e: Any) -> Value:
    """The power of two with this biased exponent; 0 for 0."""
    return apply("power", e)


def random(low: Any = 0.0, high: Any = 1.0, *, shared: bool = False) -> Value:
    """Uniform random numbers between low and high, one per element, new in each step. The ends are excluded.

    They are odd multiples of 1/131072 of the range, so rounding with them is unbiased to 2^-17 of a step; to 2^-16 from
    128 steps on, where the sum in float32 has a tie, which goes to even.

    Args:
        low, high: Range.
        shared: Whether all ranks draw the same numbers. The n-th shared call of the decoder then draws the numbers of
            the n-th shared call of the encoder.
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
    """The payload: named values. Scalars are sent as float32, arrays in the type they were mapped to, else as float32.

    Receivers refuse infinities and NaN, so floats are clamped to the finite ones of their type, and NaN becomes 0.

    One array of trits may be given as `q.zero_runs()`. It comes last, and the length of the payload then depends on
    the gradient.
    """
    if unnamed or not fields or "size" in fields:
        got = "values without" if unnamed else "'size', which is the gradient's" if fields else "none"
        raise TraceError(
            f"concat needs names for the values it sends, got {got}", user_location(),
            "write concat(scale=scale, q=q)",
        )  # fmt: skip
    here = graph()
    made = []
    for name, value in fields.items():
        node = lift(value).node
        if node.dtype == BOOL:
            raise TraceError(
                f"Cannot send {name!r}: it is a condition, not a number", user_location(),
                "use map(..., dtype=uint1) for elements, where(condition, 1.0, 0.0) for a scalar",
            )  # fmt: skip
        if node.space.kind in ("scalar", "static"):
            node = node if node.op == "narrow" else here.add("narrow", (node,))
        elif node.dtype == FLOAT and node.space.kind in ("elements", "items") and node.op != "index":
            node = node if is_finite(node) else here.add("cast", (node,), node.where, dtype=float32)
        is_coded = isinstance(lookup(node.op), Coding)
        made.append(Field(name, node.inputs[0], coding=node) if is_coded else Field(name, node))

    def place(field: Field) -> tuple[bool, float]:
        return field.coding is not None or field.is_positions, -field.dtype.bits if field.is_array else -1000.0

    return SymbolicPayload(tuple(sorted(made, key=place)))


def _only_in_reduce(name: str) -> Callable[..., Any]:
    def function(*_: object) -> Any:
        raise TraceError(f"{name} is a function for reduce", user_location(), f"write x.reduce({name})")

    function.__name__ = name
    return function


mean, norm, count = map(_only_in_reduce, ("mean", "norm", "count"))
