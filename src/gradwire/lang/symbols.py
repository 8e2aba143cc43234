"""What an algorithm handles while it is traced: symbolic gradients, scalars and lists.

The values know no numbers. Each operation on them adds a node to the graph of the trace in progress, with the line
of the algorithm that asked for it.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from gradwire.lang.errors import TraceError
from gradwire.lang.graph import graph, user_location
from gradwire.lang.ir import BOOL, SCALAR, STATIC, Node
from gradwire.lang.operators.base import lookup
from gradwire.lang.types import TYPES, ElementType

_REDUCERS = {builtins.min: "min", builtins.max: "max", builtins.sum: "sum", builtins.abs: "abs"}


class Value:
    """A symbolic number, or an array of them: what its node's space says."""

    __array_ufunc__ = None  # NumPy scalars leave arithmetic with us to us
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
            "Cannot loop over symbolic values: how many there are is not known yet", user_location(),
            "use map for each element, reduce for one number of all, filter to keep some",
        )  # fmt: skip

    def __len__(self) -> int:
        raise TraceError("Cannot take len() of symbolic values", user_location(), "use .size")

    def _number(self) -> Any:
        raise TraceError(
            "Cannot turn a symbolic value into a Python number: it is not known yet", user_location(),
            "use the functions of gradwire.lang (floor, sqrt, ...) in place of those of math",
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
        """How many there are: of the gradient, known from its length; of a list, a scalar."""
        space = self.node.space
        if space.kind == "elements":
            return Value(graph().add("size", ()))
        return Value(graph().add("length", (self.node,)))

    def map(self, function: Callable[[Value], Any] | None = None, dtype: ElementType | None = None) -> Value:
        """`function` of each element; `dtype` clamps the results to its integers, or rounds them to its floats.

        A float that is cast to an integer is truncated: say `floor` or `round_even` where that is meant.
        """
        found = lift(self if function is None else function(self))
        if dtype is None:
            return found
        if not isinstance(dtype, ElementType):
            raise TraceError(f"Expected an element type, got {dtype!r}", user_location(), f"one of {', '.join(TYPES)}")
        return Value(graph().add("cast", (found.node,), dtype=dtype))

    def reduce(self, function: Any) -> Value:
        """One number of all elements (a block's, after `blocks`; the chosen ones', after `filter`).

        Args:
            function: `min`, `max`, `sum`, or `mean`, `norm`, `count` of this module. Of nothing they give 0.
        """
        return _reduced((self.node,), function)

    def blocks(self, block: int) -> GradientBlocks:
        """The same values, in blocks of so many consecutive elements: `reduce` then gives one number a block."""
        if self.node.space.kind != "elements":
            raise TraceError(
                f"Expected elements to cut into blocks, got {self.node.space}", user_location(),
                "cut the gradient, or what map makes of it",
            )  # fmt: skip
        if isinstance(block, bool) or not isinstance(block, int):
            raise TraceError(
                f"Expected an integer for the size of blocks, got {type(block).__name__}", user_location(),
                "make it an option, block=256",
            )  # fmt: skip
        return GradientBlocks(self.node, block)

    def filter(self, predicate: Callable[[Value], Any], at_most: Any = None) -> Filtered:
        """Select the elements for which `predicate` holds.

        Returns:
            What can be reduced, or sent as the lists `index` and `value`, in the order of elements.

        Args:
            predicate: gives a comparison.
            at_most: how many to keep, the first ones; all where not given.
        """
        mask = lift(predicate(self))
        if mask.node.dtype != BOOL:
            raise TraceError(
                f"Expected a comparison from the function of filter, got {mask.node.dtype}", user_location(),
                "return something like abs(x) >= threshold",
            )  # fmt: skip
        return Filtered(self.node, mask.node, None if at_most is None else _static(at_most, "at_most").node)

    def sample(self, count: Any) -> Value:
        """A list of `count` elements from all over the gradient, one from each of so many equal parts."""
        return Value(graph().add("sample", (self.node, _static(count, "count").node)))

    def sort(self, descending: bool = False) -> Value:
        """The list in order."""
        return Value(graph().add("sort", (self.node,), descending=bool(descending)))

    def __getitem__(self, position: Any) -> Value:
        """The item of a list at a position, which is cut to the list's bounds; 0 of an empty list."""
        if self.node.space.kind != "items":
            raise TraceError(f"Cannot index {self.node.space}", user_location(), "sort or sample first, or use filter")
        return Value(graph().add("item", (self.node, lift(position).node)))

    def over_ranks(self, function: Any) -> Value:
        """A scalar reduced over all ranks before the encoding: the preliminary round. `min`, `max` or `sum`."""
        name = _name_of(function)
        return Value(graph().add("over_ranks", (self.node,), function=name))

    def scatter(self, index: Value) -> Value:
        """A gradient that has these values at these positions, and 0 elsewhere: the end of a decoder."""
        return Value(graph().add("scatter", (self.node, index.node)))

    def zero_runs(self) -> Value:
        """The same trits, of which each run of 2 to 14 bytes of zeros travels as one byte: what `concat` is given."""
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
    """Elements in blocks of so many."""

    def __init__(self, node: Node, block: int) -> None:
        self._node, self._block_size = node, block

    def map(self, function: Callable[[Value], Any] | None = None, dtype: ElementType | None = None) -> GradientBlocks:
        """As `Value.map`."""
        return GradientBlocks(Value(self._node).map(function, dtype).node, self._block_size)

    def reduce(self, function: Any) -> Value:
        """One number a block."""
        return _reduced((self._node,), function, self._block_size)

    def __getattr__(self, name: str) -> Any:
        raise _unknown(self, "What blocks gives", name, "compute first, then cut and reduce: (g * g).blocks(64)")


class Filtered:
    """The elements for which a condition holds."""

    def __init__(self, node: Node, mask: Node, at_most: Node | None) -> None:
        self._node, self._mask, self._at_most = node, mask, at_most
        self._where = user_location()

    def reduce(self, function: Any) -> Value:
        """One number of the chosen elements."""
        return _reduced((self._node, self._mask), function)

    @property
    def index(self) -> Value:
        """Positions of the chosen elements, ascending."""
        return Value(graph().add("index", (self._list(),), self._where))

    @property
    def value(self) -> Value:
        """The chosen elements."""
        return Value(graph().add("value", (self._list(),), self._where))

    @property
    def size(self) -> Value:
        """How many were chosen."""
        return Value(graph().add("length", (self._list(),), self._where))

    def top(self, count: Any) -> Filtered:
        """Of the chosen, the `count` largest magnitudes; ties go to the lowest index. All, where there are fewer."""
        found = graph().add("top", (self._list(), _static(count, "count").node))
        return _Listed(found)

    def hash(self, slots: Any) -> Filtered:
        """Of the chosen, one for each of `slots` slots, to which a hash of positions, drawn anew each step, sends them.

        Of those that meet in a slot the last stays. It takes no more than the sweep that chooses them.
        """
        if self._at_most is not None:
            raise TraceError(
                "Cannot hash with at_most: slots bound the list already", user_location(), "leave at_most out"
            )  # fmt: skip
        return _Listed(graph().add("hash", (self._node, self._mask, _static(slots, "slots").node), self._where))

    def __getattr__(self, name: str) -> Any:
        raise _unknown(self, "What filter gives", name, "use .value and .index, which are lists, or reduce it")

    def _list(self) -> Node:
        inputs = (self._node, self._mask) + (() if self._at_most is None else (self._at_most,))
        return graph().add("filter", inputs, self._where)


class _Listed(Filtered):
    """Chosen elements that are a list already."""

    def __init__(self, node: Node) -> None:
        self._made = node
        self._where = node.where

    def _list(self) -> Node:
        return self._made

    def reduce(self, function: Any) -> Value:
        return self.value.reduce(function)

    def hash(self, slots: Any) -> Filtered:
        raise TraceError(
            "Cannot hash what top or hash has chosen from", user_location(), "hash what filter gives"
        )  # fmt: skip


def lift(value: Any) -> Value:
    """A symbolic value, of one or of a Python number."""
    if isinstance(value, Value):
        return value
    if not isinstance(value, (GradientBlocks, Filtered)) and getattr(value, "shape", None) == ():  # of NumPy or torch
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
    return "use numbers, options, and what the operators gave"


def _name_of(function: Any) -> str:
    if isinstance(function, str):
        return function
    return _REDUCERS.get(function, "") or getattr(function, "__name__", repr(function))


def _reduced(inputs: tuple[Node, ...], function: Any, block: int = 0) -> Value:
    name = _name_of(function)
    if name not in lookup("reduce").functions:  # type: ignore[attr-defined]
        raise TraceError(
            f"Cannot reduce with {name}: in which order elements meet is not the algorithm's to say",
            user_location(), "map first, then reduce with min, max, sum, mean, norm or count",
        )  # fmt: skip
    return Value(graph().add("reduce", inputs, function=name, block=block))


def _unknown(value: object, what: str, name: str, remedy: str) -> Exception:
    if name.startswith("__"):
        return AttributeError(name)
    known = ", ".join(sorted(key for key in dir(type(value)) if not key.startswith("_")))
    return TraceError(f"{what} has no {name!r}; it has {known}", user_location(), remedy)


def apply(op: str, *args: Any, **attrs: Any) -> Value:
    """An operator by its name: how a function for one of your own is written.

    Scalars are rounded to float32 where arithmetic has them meet elements.
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
                f"Cannot apply {op} to numbers that are known from length and step alone", user_location(),
                "compute it from options in Python, or apply it to what reduce gives",
            )  # fmt: skip
    return Value(graph().add(op, nodes))


def _narrow(node: Node) -> Node:
    """A scalar as elements see it; what the payload carries is that already."""
    if node.space != SCALAR or node.op in ("narrow", "extract") or node.dtype == BOOL:
        return node
    return graph().add("narrow", (node,))


def _static(value: Any, what: str) -> Value:
    found = lift(value)
    if found.node.space != STATIC:
        raise TraceError(
            f"Expected {what} to follow from length, step and options alone, got a {found.node.space} value",
            user_location(), "compute it from .size, step() and options: sizes of payloads must have a bound",
        )  # fmt: skip
    return found
