"""What an algorithm handles while it is traced: symbolic gradients, scalars and lists, and the functions on them.

The values know no numbers. Each operation on them adds a node to the graph of the trace in progress, with the line
of the algorithm that asked for it.
"""

from __future__ import annotations

import builtins
import linecache
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.lang.errors import TraceError
from gradwire.lang.ir import BOOL, SCALAR, STATIC, Field, Location, Node, Space
from gradwire.lang.operators.base import lookup
from gradwire.lang.types import ElementType

_HERE = str(Path(__file__).parent)
_current = threading.local()
_REDUCERS = {builtins.min: "min", builtins.max: "max", builtins.sum: "sum", builtins.abs: "abs"}


class Graph:
    """The nodes of a trace in progress. Equal applications are one node."""

    def __init__(self) -> None:
        self.count = 0
        self.num_random = 0
        self.known: dict[Any, Node] = {}

    def add(self, op: str, inputs: Sequence[Node], where: Location | None = None, **attrs: Any) -> Node:
        where = where or user_location()
        try:
            space, dtype = lookup(op).infer(inputs, attrs)
        except ValueError as error:
            raise TraceError(f"Cannot apply {op}: {error}", where, getattr(error, "remedy", None)) from None
        key = (op, tuple(map(id, inputs)), tuple(sorted((k, repr(v)) for k, v in attrs.items())))
        if key not in self.known:
            self.count += 1
            node = Node(op, tuple(inputs), attrs, space, dtype, where, self.count)
            if space.kind == "items" and space.source is None:
                object.__setattr__(node, "space", Space("items", source=node))
            self.known[key] = node
        return self.known[key]


class tracing:  # noqa: N801 - reads as a verb
    """Context manager: operations on symbols go to this graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __enter__(self) -> Graph:
        _current.graph = self.graph
        return self.graph

    def __exit__(self, *_: object) -> None:
        _current.graph = None


def graph() -> Graph:
    """The graph of the trace in progress."""
    found: Graph | None = getattr(_current, "graph", None)
    if found is None:
        raise TraceError(
            "Expected a call from a compressor's encode or decode, got one from elsewhere", user_location(),
            "call it inside a function decorated with gradwire.compressor",
        )  # fmt: skip
    return found


def user_location() -> Location:
    """The innermost line on the stack that is not the language's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    return Location(Path(file).name, line, linecache.getline(file, line).strip())


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
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(sorted(key for key in dir(type(self)) if not key.startswith("_")))
        raise TraceError(f"A symbolic value has no {name!r}; it has {known}", user_location())

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
        return found if dtype is None else Value(graph().add("cast", (found.node,), dtype=dtype))

    def reduce(self, function: Any) -> Value:
        """One number of all elements (a block's, after `blocks`; the chosen ones', after `filter`).

        Args:
            function: `min`, `max`, `sum`, or `mean`, `norm`, `count` of this module. Of nothing they give 0.
        """
        name = function if isinstance(function, str) else _REDUCERS.get(function, getattr(function, "__name__", ""))
        if name not in lookup("reduce").functions:  # type: ignore[attr-defined]
            raise TraceError(
                f"Cannot reduce with {name or function!r}: in which order elements meet is not the algorithm's to say",
                user_location(), "map first, then reduce with min, max, sum, mean, norm or count",
            )  # fmt: skip
        return Value(graph().add("reduce", self._inputs(), function=name, block=self._block()))

    def blocks(self, block: int) -> Blocks:
        """The same values, in blocks of so many consecutive elements: `reduce` then gives one number a block."""
        if self.node.space.kind != "elements":
            raise TraceError(f"Expected elements to cut into blocks, got {self.node.space}", user_location())
        return Blocks(self.node, int(block))

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
        name = _REDUCERS.get(function, str(function))
        return Value(graph().add("over_ranks", (self.node,), function=name))

    def scatter(self, index: Value) -> Value:
        """A gradient that has these values at these positions, and 0 elsewhere: the end of a decoder."""
        return Value(graph().add("scatter", (self.node, index.node)))

    def zero_runs(self) -> Value:
        """The packed array with runs of its commonest byte shortened; the last step of an encoder."""
        return Value(graph().add("zero_runs", (self.node,)))

    def _inputs(self) -> tuple[Node, ...]:
        return (self.node,)

    def _block(self) -> int:
        return 0


class Blocks(Value):
    """Elements in blocks."""

    def __init__(self, node: Node, block: int) -> None:
        super().__init__(node)
        self.block_size = block

    def _block(self) -> int:
        return self.block_size


class Filtered:
    """The elements for which a condition holds."""

    def __init__(self, node: Node, mask: Node, at_most: Node | None) -> None:
        self._node, self._mask, self._at_most = node, mask, at_most
        self._where = user_location()

    def reduce(self, function: Any) -> Value:
        """One number of the chosen elements."""
        chosen = _Chosen(self._node, self._mask)
        return chosen.reduce(function)

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


class _Chosen(Value):
    def __init__(self, node: Node, mask: Node) -> None:
        super().__init__(node)
        self.mask_node = mask

    def _inputs(self) -> tuple[Node, ...]:
        return (self.node, self.mask_node)


class Payload:
    """What `concat` makes: named values in the order in which they travel."""

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self.fields = fields


class Message:
    """A payload as the decoder sees it: its fields are attributes, `size` is that of the gradient."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.__dict__.update(values)

    @property
    def size(self) -> Value:
        return Value(graph().add("size", ()))

    def __getattr__(self, name: str) -> Any:
        raise TraceError(
            f"The payload has no field {name!r}; it has {', '.join(sorted(self.__dict__))}", user_location(),
            "name it in concat",
        )  # fmt: skip


def lift(value: Any) -> Value:
    """A symbolic value, of one or of a Python number."""
    if isinstance(value, Value):
        return value
    if isinstance(value, (bool, int, float)) or (hasattr(value, "item") and not hasattr(value, "shape")):
        return Value(graph().add("constant", (), value=value))
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return Value(graph().add("constant", (), value=value.item()))
    if value is None:
        raise TraceError("Expected a number, got None", user_location(), "return the result of the function")
    raise TraceError(
        f"Expected a number or a symbolic value, got {type(value).__name__}", user_location(),
        "use numbers, options, and what the operators gave",
    )  # fmt: skip


def apply(op: str, *args: Any) -> Value:
    """Arithmetic. Scalars are rounded to float32 where they meet elements."""
    nodes = [lift(arg).node for arg in args]
    if any(node.space.kind in ("elements", "items", "blocks") for node in nodes):
        nodes = [_narrow(node) for node in nodes]
    elif STATIC in {node.space for node in nodes} and SCALAR not in {node.space for node in nodes}:
        static = getattr(lookup(op), "static", None)
        if static is None:
            raise TraceError(f"Cannot apply {op} to numbers that are known from the length alone", user_location())
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
            f"Expected {what} to follow from the length and the options alone, got a {found.node.space} value",
            user_location(), "compute it from .size and options: sizes of payloads must have a bound",
        )  # fmt: skip
    return found


# -- functions of the language -------------------------------------------------------------------------------


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
        shared: the same on all ranks; else each rank draws its own.
    """
    here = graph()
    here.num_random += 1
    unit = Value(here.add("random", (), shared=bool(shared), stream=here.num_random - 1))
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        if (low, high) == (0, 1):
            return unit
        return apply("add", unit * float(high - low), low)
    return apply("add", unit * (lift(high) - low), low)


def concat(**fields: Any) -> Payload:
    """The payload: values by name. Scalars travel as float32, arrays as the type they were mapped to."""
    if not fields:
        raise TraceError("Expected something to send, got an empty concat", user_location())
    here = graph()
    made = []
    for name, value in fields.items():
        node = lift(value).node
        if node.space.kind in ("scalar", "static"):
            node = node if node.op == "narrow" else here.add("narrow", (node,))
        elif node.dtype == BOOL:
            raise TraceError(
                f"Expected numbers to send as {name!r}, got conditions", user_location(), "map(..., dtype=uint1)"
            )
        made.append(Field(name, node))

    def width(field: Field) -> float:
        return -field.dtype.bits if field.is_array else -1000.0

    return Payload(tuple(sorted(made, key=width)))


def _only_in_reduce(name: str) -> Callable[..., Any]:
    def function(*_: object) -> Any:
        raise TraceError(f"{name} is a function for reduce", user_location(), f"x.reduce({name})")

    function.__name__ = name
    return function


mean, norm, count = map(_only_in_reduce, ("mean", "norm", "count"))
