"""Symbolic gradients, scalars and lists, which an algorithm handles while it is traced.

They hold no numbers. Each operation adds a node to the graph of the trace in progress, with its line of the algorithm.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from gradwire.lang.errors import TraceError
from gradwire.lang.graph import graph, user_location
from gradwire.lang.ir import BOOL, SCALAR, STATIC, Node, closure
from gradwire.lang.operators.base import lookup
from gradwire.lang.types import TYPES, ElementType

_REDUCERS = {builtins.min: "min", builtins.max: "max", builtins.sum: "sum", builtins.abs: "abs"}


class Value:
    """A symbolic number or array, depending on the space of its node."""

    __array_ufunc__ = None  # makes NumPy scalars use our operators
    __hash__ = object.__hash__

    def __init__(self, node: Node) -> None:
        self.node = node

    # -- arithmetic ------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Value:
        return apply("add", self, other)

    def __radd__(self, other: Any) -> Value:
        return apply("add", other, self)

    def __sub__(self, other: Any) -> Value:
        return apply("sub", self, other)

    def __rsub__(self, other: Any) -> Value:
        return apply("sub", other, self)

    def __mul__(self, other: Any) -> Value:
        return apply("mul", self, other)

    def __rmul__(self, other: Any) -> Value:
        return apply("mul", other, self)

    def __truediv__(self, other: Any) -> Value:
        return apply("div", self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return apply("div", other, self)

    def __neg__(self) -> Value:
        return apply("mul", self, -1.0)

    def __abs__(self) -> Value:
        return apply("abs", self)

    def __lt__(self, other: Any) -> Value:
        return apply("lt", self, other)

    def __le__(self, other: Any) -> Value:
        return apply("le", self, other)

    def __gt__(self, other: Any) -> Value:
        return apply("gt", self, other)

    def __ge__(self, other: Any) -> Value:
        return apply("ge", self, other)

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return apply("eq", self, other)

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return apply("ne", self, other)

    def __and__(self, other: Any) -> Value:
        return apply("and", self, other)

    def __or__(self, other: Any) -> Value:
        return apply("or", self, other)

    def __invert__(self) -> Value:
        return apply("not", self)

    # -- what cannot be traced -------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        raise TraceError(
            "Cannot decide a condition while tracing: its value is not known yet", user_location(),
            "use where(condition, a, b) for if, minimum and maximum for min and max of two, & | ~ for and, or, not",
        )  # fmt: skip

    def __iter__(self) -> Any:
        raise TraceError(
            "Cannot loop over symbolic values: their number is not known yet", user_location(),
            "use map for each element, reduce for one number, filter to keep some",
        )  # fmt: skip

    def __len__(self) -> int:
        raise TraceError("Cannot take len() of symbolic values", user_location(), "use .size")

    def _number(self) -> Any:
        raise TraceError(
            "Cannot turn a symbolic value into a Python number: it is not known yet", user_location(),
            "use the functions of gradwire.lang (floor, sqrt, ...) instead of those of math",
        )  # fmt: skip

    __float__ = __int__ = __index__ = __round__ = __floor__ = __ceil__ = __trunc__ = _number

    def __array__(self, *_: object, **__: object) -> Any:
        raise TraceError(
            "Cannot use a NumPy or torch function on a symbolic value", user_location(),
            "use the functions of gradwire.lang (floor, sqrt, where, ...)",
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        raise _unknown(self, "A symbolic value", name, "use map with the functions of gradwire.lang, or reduce")

    # -- operators -------------------------------------------------------------------------------------------

    @property
    def size(self) -> Value:
        """Number of values: of the gradient, known from its length; of a list, a scalar."""
        space = self.node.space
        if space.kind == "elements":
            return Value(graph().add("size", ()))
        return Value(graph().add("length", (self.node,)))

    def map(self, function: Callable[[Value], Any] | None = None, dtype: ElementType | None = None) -> Value:
        """Apply a function to each element. `dtype` clamps the results to its integers, or to its finite floats.

        Casting a float to an integer type truncates. Use `floor` or `round_even` to round. A cast to a float type
        rounds to nearest. NaN becomes 0.
        """
        found = lift(self if function is None else function(self))
        if dtype is None:
            return found
        if not isinstance(dtype, ElementType):
            raise TraceError(f"Expected an element type, got {dtype!r}", user_location(), f"use {', '.join(TYPES)}")
        return Value(graph().add("cast", (found.node,), dtype=dtype))

    def reduce(self, function: Any) -> Value:
        """Reduce all elements to one number (those of each block after `blocks`, the chosen ones after `filter`).

        Args:
            function: `min`, `max`, `sum`, or `mean`, `norm`, `count` of this module. `count` of a condition counts the
                elements for which it holds. `min` and `max` leave out NaN. The result for no elements is 0.
        """
        return _reduced((self.node,), function)

    def blocks(self, block: int) -> GradientBlocks:
        """The values in blocks of `block` consecutive elements. `reduce` then yields one number per block."""
        if self.node.space.kind != "elements":
            raise TraceError(
                f"Only elements can be divided into blocks, not {self.node.space}", user_location(),
                "divide the gradient, or a map of the gradient",
            )  # fmt: skip
        if isinstance(block, bool) or not isinstance(block, int):
            raise TraceError(
                f"The size of blocks must be an integer, got {type(block).__name__}", user_location(),
                "make it an option, block=256",
            )  # fmt: skip
        return GradientBlocks(self.node, block)

    def filter(self, predicate: Callable[[Value], Any], at_most: Any = None) -> Filtered:
        """Select the elements for which `predicate` holds.

        Args:
            predicate: Returns a comparison.
            at_most: Maximum number of elements; the first ones are kept. Default: no limit.

        Returns:
            The selected elements, to be reduced, or sent as the lists `index` and `value` in the order of elements.
        """
        mask = lift(predicate(self))
        if mask.node.dtype != BOOL:
            raise TraceError(
                f"The function of filter must return a comparison, got {mask.node.dtype}", user_location(),
                "return something like abs(x) >= threshold",
            )  # fmt: skip
        return Filtered(self.node, mask.node, None if at_most is None else _bound(at_most, "at_most").node)

    def sample(self, count: Any) -> Value:
        """A list of `count` elements, one from each of `count` equal parts of the gradient."""
        return Value(graph().add("sample", (self.node, _static(count, "count").node)))

    def sort(self, descending: bool = False) -> Value:
        """The list in order."""
        return Value(graph().add("sort", (self.node,), descending=bool(descending)))

    def __getitem__(self, position: Any) -> Value:
        """The item of a list at a position, which is clamped to the list. 0 if the list is empty."""
        if self.node.space.kind != "items":
            raise TraceError(f"Cannot index {self.node.space}", user_location(), "sort or sample first, or use filter")
        return Value(graph().add("item", (self.node, lift(position).node)))

    def over_ranks(self, function: Any) -> Value:
        """Reduce a scalar over all ranks before encoding, in the preliminary round: `min`, `max` or `sum`."""
        name = _name_of(function)
        return Value(graph().add("over_ranks", (self.node,), function=name))

    def scatter(self, index: Value) -> Value:
        """A gradient with these values at these positions, 0 elsewhere. The last step of a decoder."""
        return Value(graph().add("scatter", (self.node, index.node)))

    def zero_runs(self) -> Value:
        """The trits for `concat`, with each run of 2 to 14 bytes of zeros sent as one byte."""
        return Value(graph().add("zero_runs", (self.node,)))


def _missing(sign: str, remedy: str) -> Callable[..., Any]:
    def refuse(*_: object) -> Any:
        raise TraceError(f"Symbolic values have no {sign}", user_location(), remedy)

    return refuse


for _method, _sign, _remedy in (
    ("__pow__", "**", "multiply: x * x; power(e) is the power of two with exponent e"),
    ("__rpow__", "**", "multiply: x * x; power(e) is the power of two with exponent e"),
    ("__floordiv__", "//", "use floor(a / b)"),
    ("__rfloordiv__", "//", "use floor(a / b)"),
    ("__mod__", "%", "use a - floor(a / b) * b"),
    ("__rmod__", "%", "use a - floor(a / b) * b"),
    ("__xor__", "^", "use & | ~ between conditions"),
    ("__matmul__", "@", "use map and reduce(sum)"),
    ("__setitem__", "assignment to items", "use where(condition, a, b)"),
    ("__contains__", "in", "use filter and count"),
):
    setattr(Value, _method, _missing(_sign, _remedy))


class GradientBlocks:
    """Elements divided into blocks."""

    def __init__(self, node: Node, block: int) -> None:
        self._node, self._block_size = node, block

    def map(self, function: Callable[[Value], Any] | None = None, dtype: ElementType | None = None) -> GradientBlocks:
        """Apply a function to each element, as `Value.map` does."""
        return GradientBlocks(Value(self._node).map(function, dtype).node, self._block_size)

    def reduce(self, function: Any) -> Value:
        """Reduce each block to one number."""
        return _reduced((self._node,), function, self._block_size)

    def __getattr__(self, name: str) -> Any:
        raise _unknown(self, "The result of blocks", name, "compute first, then divide: (g * g).blocks(64).reduce(sum)")


class Filtered:
    """The elements for which a condition holds."""

    def __init__(self, node: Node, mask: Node, at_most: Node | None) -> None:
        self._node, self._mask, self._at_most = node, mask, at_most
        self._where = user_location()

    def reduce(self, function: Any) -> Value:
        """Reduce the selected elements to one number."""
        if self._at_most is not None:
            return self.value.reduce(function)
        return _reduced((self._node, self._mask), function)

    @property
    def index(self) -> Value:
        """Positions of the selected elements, ascending."""
        return Value(graph().add("index", (self._list(),), self._where))

    @property
    def value(self) -> Value:
        """The selected elements."""
        return Value(graph().add("value", (self._list(),), self._where))

    @property
    def size(self) -> Value:
        """Number of selected elements."""
        return Value(graph().add("length", (self._list(),), self._where))

    def top(self, count: Any) -> Filtered:
        """Keep the `count` largest magnitudes, or all if there are fewer. Ties go to the lowest index."""
        found = graph().add("top", (self._list(), _bound(count, "count").node))
        return _Listed(found)

    def hash(self, slots: Any) -> Filtered:
        """Keep one element for each of `slots` slots. A hash function of positions, new in each step, assigns slots.

        Of the elements that share a slot, the largest magnitude is kept. This takes no sweep beyond that of the filter.
        """
        if self._at_most is not None:
            raise TraceError("Cannot hash with at_most: slots already limit the list", user_location(), "omit at_most")
        return _Listed(graph().add("hash", (self._node, self._mask, _bound(slots, "slots").node), self._where))

    def __getattr__(self, name: str) -> Any:
        raise _unknown(self, "The result of filter", name, "use .value and .index, which are lists, or reduce it")

    def _list(self) -> Node:
        inputs = (self._node, self._mask) + (() if self._at_most is None else (self._at_most,))
        return graph().add("filter", inputs, self._where)


class _Listed(Filtered):
    """Selected elements that are already a list."""

    def __init__(self, node: Node) -> None:
        self._made = node
        self._where = node.where

    def _list(self) -> Node:
        return self._made

    def reduce(self, function: Any) -> Value:
        return self.value.reduce(function)

    def hash(self, slots: Any) -> Filtered:
        raise TraceError("Cannot hash the result of top or hash", user_location(), "hash the result of filter")


def lift(value: Any) -> Value:
    """A value as a symbolic one; Python numbers become constants."""
    if isinstance(value, Value):
        return value
    if not isinstance(value, (GradientBlocks, Filtered)) and getattr(value, "shape", None) == ():  # NumPy or torch
        value = value.item()
    if value is None:
        raise TraceError("Expected a number, got None", user_location(), "return the result of the function")
    if not isinstance(value, (bool, int, float)):
        raise TraceError(
            f"Expected a number or a symbolic value, got {type(value).__name__}", user_location(), _numbers_of(value)
        )
    if not math.isfinite(value):
        raise TraceError(f"Expected a finite number, got {value}", user_location(), "choose one below 3.4e38")
    return Value(graph().add("constant", (), value=value))


def _numbers_of(value: object) -> str:
    if isinstance(value, GradientBlocks):
        return "reduce the blocks, or compute before blocks"
    if isinstance(value, Filtered):
        return "use .value and .index of it, or reduce it"
    return "use numbers, options, and results of operators"


def _name_of(function: Any) -> str:
    if isinstance(function, str):
        return function
    return _REDUCERS.get(function, "") or getattr(function, "__name__", repr(function))


def _reduced(inputs: tuple[Node, ...], function: Any, block: int = 0) -> Value:
    name = _name_of(function)
    if name not in lookup("reduce").functions:  # type: ignore[attr-defined]
        raise TraceError(
            f"Cannot reduce with {name}: an algorithm cannot define the order in which elements are combined",
            user_location(), "map first, then reduce with min, max, sum, mean, norm or count",
        )  # fmt: skip
    return Value(graph().add("reduce", inputs, function=name, block=block))


def _unknown(value: object, what: str, name: str, remedy: str) -> Exception:
    if name.startswith("__"):
        return AttributeError(name)
    known = ", ".join(sorted(key for key in dir(type(value)) if not key.startswith("_")))
    return TraceError(f"{what} has no {name!r}; it has {known}", user_location(), remedy)


def apply(op: str, *args: Any, **attrs: Any) -> Value:
    """Apply an operator by its name, for instance one of your own.

    Scalars are rounded to float32 where arithmetic combines them with elements.
    """
    nodes = [lift(arg).node for arg in args]
    if lookup(op).is_collective:
        return Value(graph().add(op, nodes, **attrs))
    if any(node.space.kind in ("elements", "items", "blocks") for node in nodes):
        nodes = [_narrow(node) for node in nodes]
    elif STATIC in {node.space for node in nodes} and SCALAR not in {node.space for node in nodes}:
        static = getattr(lookup(op), "static", None)
        if static is None:
            raise TraceError(
                f"Cannot apply {op} to numbers known from length and step alone", user_location(),
                "compute it from options in Python, or apply it to a result of reduce",
            )  # fmt: skip
    return Value(graph().add(op, nodes))


def _narrow(node: Node) -> Node:
    """A scalar rounded to float32. Fields of the payload already are."""
    if node.space != SCALAR or node.op in ("narrow", "extract") or node.dtype == BOOL:
        return node
    return graph().add("narrow", (node,))


def _static(value: Any, what: str) -> Value:
    found = lift(value)
    if found.node.space != STATIC:
        raise TraceError(
            f"{what} must be known from length, step and options alone, got a {found.node.space} value",
            user_location(), "compute it from .size, step() and options: payload sizes must have a bound",
        )  # fmt: skip
    return found


def _bound(value: Any, what: str) -> Value:
    """The largest length of a list, which the receiver must know."""
    found = _static(value, what)
    if any(node.op == "previous_state" for node in closure([found.node])):
        raise TraceError(
            f"{what} cannot depend on previous_state(), which the receiver does not know", user_location(),
            "compute it from .size, step() and options: payload sizes must have a bound",
        )  # fmt: skip
    return found
