"""Arithmetic, element by element. Each operation rounds once.

`minimum` and `maximum` return the second argument if the comparison fails, also for NaN. `exponent` is the biased
exponent of a float32, 0 to 255, and `power` the float32 with that exponent and no mantissa (0 for 0). `cast` clamps to
the range of an integer type, or to the finite floats of a float type, and rounds to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from gradwire.kernels.reference.elements import as_float32
from gradwire.kernels.reference.sweep import cast as cast_kernel
from gradwire.lang.ir import BOOL, ELEMENTS, FLOAT, SCALAR, STATIC, Dtype, Node, Space
from gradwire.lang.operators.base import FitError, Operator, lookup, quietly, register
from gradwire.lang.types import ElementType

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Text:
    """Source of an operand, and whether it is a vector or, on the CPU, a scalar."""

    source: str
    is_vector: bool

    @property
    def vector(self) -> str:
        """As a vector."""
        return self.source if self.is_vector else f"splat({self.source}, LANES)"


class Arithmetic(Operator):
    """A function of numbers.

    Attributes:
        arity: Number of arguments.
        result: Type of the result.
        numpy: Reference for arrays and scalars.
        vector: Numba source. At least one operand is a vector of float32.
        scalar: Python source for float64 scalars, in Numba and, unless `torch` is given, in torch.
        triton: Triton source.
        torch: Torch source for scalars.
        static: Function of exact fractions, for numbers known from length and step; None if not allowed there.
        of_conditions: Whether the arguments are conditions instead of numbers.
        of_elements: Whether it is for elements only, with no source for scalars and blocks.
    """

    is_collective: ClassVar[bool] = False

    def __init__(
        self,
        name: str,
        arity: int,
        numpy: Callable[..., Any],
        vector: Callable[..., str],
        scalar: Callable[..., str],
        triton: Callable[..., str],
        *,
        result: Dtype = FLOAT,
        torch: Callable[..., str] | None = None,
        static: Callable[..., Any] | None = None,
        of_conditions: bool = False,
        of_elements: bool = False,
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.arity, self.result, self.of_conditions, self.of_elements = arity, result, of_conditions, of_elements
        self.numpy, self.vector, self.scalar, self.triton, self.static = numpy, vector, scalar, triton, static
        self.torch = torch or scalar

    @property
    def origin(self) -> str:
        """Module that defines it; all arithmetic operators share one class."""
        return f"{self.vector.__module__}.{self.name}"

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        if self.of_conditions:
            expect_conditions(inputs)
        else:
            expect_numbers(inputs)
        space = joined([node.space for node in inputs])
        if self.of_elements and space.kind not in ("elements", "items"):
            raise FitError(f"it is for elements, not for {space}", "apply it to elements, in map")
        return space, self.result

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        return quietly(self.numpy, *inputs)


def expect_numbers(inputs: Sequence[Node]) -> None:
    """Raise `FitError` for a condition."""
    if any(node.dtype == BOOL for node in inputs):
        raise FitError("a condition is not a number", "use where(condition, 1.0, 0.0)")


def expect_conditions(inputs: Sequence[Node]) -> None:
    """Raise `FitError` for a number."""
    if any(node.dtype != BOOL for node in inputs):
        raise FitError("a number is not a condition", "compare it, as in x > 0; for an option, use Python's if")


def joined(spaces: Sequence[Space]) -> Space:
    """The space of arithmetic with values of these spaces. Raises `FitError` if they do not fit."""
    items = {space for space in spaces if space.kind == "items"}
    kinds = {space.kind for space in spaces}
    if len(items) > 1:
        raise FitError("two lists of different origin do not line up", "filter once, with | between conditions")
    if items:
        if kinds & {"elements", "blocks"}:
            raise FitError(
                "the items of a list and the elements of the gradient do not line up",
                "compute with the elements before filter, or reduce one of the two to a scalar",
            )
        return items.pop()
    if "elements" in kinds:
        return ELEMENTS
    blocks = {space for space in spaces if space.kind == "blocks"}
    if len(blocks) > 1:
        raise FitError("blocks of different sizes do not line up", "use one size in an algorithm")
    if blocks:
        return blocks.pop()
    return SCALAR if "scalar" in kinds else STATIC


def _infix(sign: str, commutes: bool = False) -> Callable[[Text, Text], str]:
    def render(a: Text, b: Text) -> str:
        if a.is_vector:
            return f"({a.source} {sign} {b.source})"
        if commutes:
            return f"({b.source} {sign} {a.source})"
        return f"({a.vector} {sign} {b.source})"

    return render


def _call(function: str) -> Callable[..., str]:
    return lambda *args: f"{function}({', '.join(args)})"


def _vector_call(function: str) -> Callable[..., str]:
    return lambda *args: f"{function}({', '.join(arg.vector for arg in args)})"


def _binary(
    name: str, sign: str, numpy: Any, static: Any, *, commutes: bool = False, triton: Any = None, torch: Any = None
) -> None:  # fmt: skip
    def plain(a: str, b: str) -> str:
        return f"({a} {sign} {b})"

    register(Arithmetic(name, 2, numpy, _infix(sign, commutes), plain, triton or plain, torch=torch, static=static))


def _comparison(name: str, sign: str, numpy: Any, static: Any) -> None:
    def plain(a: str, b: str) -> str:
        return f"({a} {sign} {b})"

    register(Arithmetic(name, 2, numpy, _infix(sign), plain, plain, result=BOOL, static=static))


def _quotient(a: float | Fraction, b: float | Fraction) -> float | Fraction:
    """Exact, unless one is a float. By 0, infinite or, as 0 / 0, not a number."""
    if b == 0:
        return math.copysign(math.inf, a) if a and a == a else math.nan
    return a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a) / b


_binary("add", "+", np.add, lambda a, b: a + b, commutes=True)
_binary("sub", "-", np.subtract, lambda a, b: a - b)
_binary("mul", "*", np.multiply, lambda a, b: a * b, commutes=True)
_binary("div", "/", np.divide, _quotient, triton=_call("tl.div_rn"), torch=_call("divide"))
_comparison("lt", "<", np.less, lambda a, b: a < b)
_comparison("le", "<=", np.less_equal, lambda a, b: a <= b)
_comparison("gt", ">", np.greater, lambda a, b: a > b)
_comparison("ge", ">=", np.greater_equal, lambda a, b: a >= b)
_comparison("eq", "==", np.equal, lambda a, b: a == b)
_comparison("ne", "!=", np.not_equal, lambda a, b: a != b)


def _unary(name: str, numpy: Any, vector: str, scalar: str, triton: str, torch: str, static: Any = None) -> None:
    register(
        Arithmetic(
            name, 1, numpy, _vector_call(vector), _call(scalar), _call(triton), torch=_call(torch), static=static
        )
    )  # fmt: skip


_unary("floor", np.floor, "floor", "np.floor", "floor", "torch.floor", math.floor)
_unary("ceil", np.ceil, "ceil", "np.ceil", "ceil", "torch.ceil", math.ceil)
_unary("round_even", np.rint, "round_even", "np.rint", "round_even", "torch.round", round)
_unary("abs", np.abs, "magnitude", "abs", "tl.abs", "torch.abs", abs)
_unary("sqrt", np.sqrt, "sqrt", "np.sqrt", "tl.sqrt_rn", "torch.sqrt")


def _numpy_exponent(x: Any) -> Any:
    return ((np.asarray(x, np.float32).view(np.uint32) >> 23) & 0xFF).astype(np.float32)


def _numpy_power(x: Any) -> Any:
    return (np.asarray(x, np.float32).astype(np.uint32) << np.uint32(23)).view(np.float32)


def _elements_only(name: str) -> Callable[..., str]:
    def refuse(*_: str) -> str:
        raise ValueError(f"{name} is for elements only")

    return refuse


for _name, _numpy in (("exponent", _numpy_exponent), ("power", _numpy_power)):
    register(Arithmetic(_name, 1, _numpy, _vector_call(_name), _elements_only(_name), _call(_name), of_elements=True))

register(
    Arithmetic(
        "minimum", 2, lambda a, b: np.where(np.less(a, b), a, b), _vector_call("minimum"),
        lambda a, b: f"({a} if {a} < {b} else {b})", lambda a, b: f"tl.where({a} < {b}, {a}, {b})",
        torch=lambda a, b: f"torch.where({a} < {b}, {a}, {b})", static=min,
    )
)  # fmt: skip
register(
    Arithmetic(
        "maximum", 2, lambda a, b: np.where(np.greater(a, b), a, b), _vector_call("maximum"),
        lambda a, b: f"({a} if {a} > {b} else {b})", lambda a, b: f"tl.where({a} > {b}, {a}, {b})",
        torch=lambda a, b: f"torch.where({a} > {b}, {a}, {b})", static=max,
    )
)  # fmt: skip
register(
    Arithmetic(
        "and", 2, np.logical_and, _infix("&"), lambda a, b: f"({a} and {b})", lambda a, b: f"({a} & {b})",
        result=BOOL, of_conditions=True, torch=lambda a, b: f"({a} & {b})",
    )
)  # fmt: skip
register(
    Arithmetic(
        "or", 2, np.logical_or, _infix("|"), lambda a, b: f"({a} or {b})", lambda a, b: f"({a} | {b})",
        result=BOOL, of_conditions=True, torch=lambda a, b: f"({a} | {b})",
    )
)  # fmt: skip
register(
    Arithmetic(
        "not", 1, np.logical_not, _vector_call("inverted"), lambda a: f"(not {a})", lambda a: f"(~{a})",
        result=BOOL, of_conditions=True, torch=lambda a: f"(~{a})",
    )
)  # fmt: skip


class Where(Arithmetic):
    """`where(condition, a, b)`: a where the condition holds, else b."""

    def __init__(self) -> None:
        super().__init__(
            "where", 3, np.where, self._vector, lambda c, a, b: f"({a} if {c} else {b})", _call("tl.where"),
            torch=_call("choose"), static=lambda c, a, b: a if c else b,
        )  # fmt: skip

    @staticmethod
    def _vector(condition: Text, a: Text, b: Text) -> str:
        if not condition.is_vector:
            return f"({a.vector} if {condition.source} else {b.vector})"
        return f"select({condition.source}, {a.vector}, {b.vector})"

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        expect_conditions(inputs[:1])
        expect_numbers(inputs[1:])
        return joined([node.space for node in inputs]), FLOAT


register(Where())


def narrowed(value: Any) -> np.float32:
    """A float64 rounded to a finite float32: values beyond its range are clamped, NaN becomes 0."""
    with np.errstate(all="ignore"):
        if np.isnan(value):
            return np.float32(0)
        return np.float32(min(max(float(value), -LARGEST), LARGEST))


class Narrow(Arithmetic):
    """`narrow(scalar)`: round a scalar to a finite float32, as the payload carries it and elements see it.

    A number known from length and step becomes a scalar.
    """

    def __init__(self) -> None:
        super().__init__(
            "narrow", 1, narrowed, _elements_only("narrow"), _call("narrow"), _elements_only("narrow"),
            torch=_call("narrow"),
        )  # fmt: skip

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        space, dtype = super().infer(inputs, attrs)
        return SCALAR if space == STATIC else space, dtype


register(Narrow())


class StaticNumber(Operator):
    """A number known without reading the gradient.

    `constant` is a number of the algorithm or an option, `size` the number of elements, `step` the number of the
    synchronization step. These are known to the receiver. `previous_state`, what the last step's encode left, is not.
    """

    is_collective: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        return STATIC, FLOAT

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        return float(evaluate_static(node, env.size, env.step, env.previous_state))


class Cast(Operator):
    """A value of an element type: clamped to its integers, or clamped and rounded to its finite floats."""

    name = "cast"
    is_collective: ClassVar[bool] = False

    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        if inputs[0].space.kind not in ("elements", "items"):
            raise FitError(f"{inputs[0].space} are sent as float32", "omit dtype=, or map elements or items")
        return inputs[0].space, attrs["dtype"]

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        return cast_reference(np.asarray(inputs[0]), node.attrs["dtype"])


def cast_reference(values: np.ndarray, dtype: ElementType) -> np.ndarray:
    """Numbers clamped and rounded to an element type, as float32."""
    values = values.astype(np.float32)
    values = np.where(np.isnan(values), np.float32(0), values)
    if dtype.is_integer:
        low, high = np.float32(dtype.low), np.float32(dtype.high)
        values = np.where(values > low, values, low)
        integers: np.ndarray = np.trunc(np.where(values < high, values, high)) + np.float32(0)  # no integer is -0
        return integers.astype(np.float32)
    values = np.clip(values, np.float32(-dtype.largest), np.float32(dtype.largest))
    if dtype.name == "float32":
        return values
    short = np.empty(values.size, dtype.storage)
    cast_kernel(values, short)
    return as_float32(short)


for _operator in (*map(StaticNumber, ("constant", "size", "step", "previous_state")), Cast()):
    register(_operator)


def static_values(nodes: Iterable[Node], size: int, step: int = 0, previous_state: float = 0.0) -> np.ndarray:
    """Values of static nodes, float64: the argument `static` of generated code."""
    return np.array([float(evaluate_static(node, size, step, previous_state)) for node in nodes], np.float64)


def evaluate_static(node: Node, size: int, step: int = 0, previous_state: float = 0.0) -> Fraction | int | float | bool:
    """Exact value of a static node: 7 % of 100 elements are 7, not 7.000000000000001."""
    if node.op == "constant":
        value = node.attrs["value"]
        return Fraction(repr(value)) if isinstance(value, float) else value
    if node.op == "size":
        return size
    if node.op == "step":
        return step
    if node.op == "previous_state":
        return previous_state
    operator = lookup(node.op)
    assert isinstance(operator, Arithmetic) and operator.static is not None
    return operator.static(*(evaluate_static(each, size, step, previous_state) for each in node.inputs))  # type: ignore[no-any-return]
