"""Operators: a shape rule, a NumPy reference, and an emitter for each backend.

There are four kinds, which differ in where their code is placed in a generated function:

- `Arithmetic` is an expression, for an element or a scalar.
- `Sink` consumes the elements of a sweep and produces a scalar or a list: code before, inside and after the loop.
- `Statement` is placed between sweeps.
- `Coding` is placed after the sweeps of an encoder, where it shortens packed bytes, and before those of a decoder.

To add an operator, derive from one of these classes in a file of your own and call `register`. docs/extend.md has an
example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from gradwire.core.errors import UnknownNameError
from gradwire.lang.ir import Dtype, Field, Node, Program, Space

_OPERATORS: dict[str, Operator] = {}


class FitError(ValueError):
    """An operator does not accept its inputs.

    Attributes:
        remedy: What to do instead, as an imperative phrase.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


class Operator(ABC):
    """Base of all operators.

    Attributes:
        name: Name in nodes and messages.
        is_collective: Whether it is one of CompLL's operators or similar to them, instead of arithmetic.
    """

    name: ClassVar[str]
    is_collective: ClassVar[bool] = True

    @property
    def origin(self) -> str:
        """Where it is defined. An operator of the same origin may replace it."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    @abstractmethod
    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        """Shape rule: space and type of the result. Raises `FitError` if the inputs do not fit."""

    @abstractmethod
    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        """The value, computed with NumPy. Every backend must produce the same bits.

        Args:
            node: Application of the operator.
            inputs: Values of its inputs. Elements, blocks and items are float32 arrays (masks bool), scalars float64.
            env: The `gradwire.lang.interpret.Environment` of the call, with size, keys and offset.
        """


@dataclass
class Emission:
    """Lines of a sink. The indentation of each list starts at zero.

    Attributes:
        before: Lines before the loop over chunks.
        chunk: Lines at the start of each chunk of 1,024 elements.
        inside: Lines in the loop over vectors.
        end: Lines at the end of each chunk.
        after: Lines after the loop.
    """

    before: list[str] = field(default_factory=list)
    chunk: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


@dataclass
class DeviceEmission:
    """Lines of a sink for a GPU, in the kernel and in the host function that launches it.

    Attributes:
        parts: Names and torch dtypes of tensors with one value per chunk.
        inside: Lines in the kernel. The variable `chunk` is the number of its chunk.
        after: Lines on the host after the kernel.
        again: Lines in a second kernel over the same elements, launched after that.
        outputs: Host variables that the second kernel takes.
        before: Lines on the host before the kernel.
        takes: Host variables that the kernel takes in addition to its elements and `parts`.
    """

    parts: dict[str, str]
    inside: list[str]
    after: list[str]
    again: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    takes: list[str] = field(default_factory=list)


class Sink(Operator):
    """An operator that consumes the elements of a sweep."""

    @abstractmethod
    def cpu(self, node: Node, name: str, value: str, mask: str | None) -> Emission:
        """Numba source that assigns the result to the variable `name`.

        Args:
            node: Application of the operator.
            name: Variable of the result, and prefix of all others.
            value: Expression of the current vector, float32 or a mask.
            mask: Variable with the mask of the lanes to consume, or None for all.
        """

    def triton(self, node: Node, name: str, value: str, chosen: str) -> DeviceEmission:
        """Triton and torch source that assigns the result to the host variable `name`. For GPUs only.

        Args:
            node: Application of the operator.
            name: Host variable of the result, and prefix of all others.
            value: Kernel variable with the values of a chunk.
            chosen: Kernel variable with the mask of the lanes to consume.
        """
        raise no_triton(self)


class Statement(Operator):
    """An operator whose code is placed between sweeps."""

    @abstractmethod
    def cpu(self, node: Node, name: str, inputs: Sequence[str]) -> list[str]:
        """Numba source that assigns the result to the variable `name`."""

    def triton(self, node: Node, name: str, inputs: Sequence[str]) -> list[str]:
        """Torch source that assigns the result to the variable `name`. For GPUs only."""
        raise no_triton(self)


class Coding(Operator):
    """A lossless operator on bytes, which shortens the last packed array of a payload.

    It changes no value, so sweeps pack and unpack as without it, and never makes a body longer.
    """

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        return inputs[0]

    @abstractmethod
    def shorten(self, packed: np.ndarray) -> np.ndarray:
        """The bytes to send instead of `packed`, computed with NumPy. Never longer."""

    @abstractmethod
    def expand(self, coded: np.ndarray, num_bytes: int) -> np.ndarray | None:
        """Undo `shorten`; None if `coded` is no encoding of `num_bytes` bytes."""

    @abstractmethod
    def cpu_shorten(self, packed: str, out: str) -> str:
        """Numba expression that writes the bytes to send to `out`, as long as `packed`, and returns their number."""

    @abstractmethod
    def cpu_expand(self, coded: str, out: str) -> str:
        """Numba expression that fills `out` with the packed bytes; negative if `coded` is invalid.

        The code writes only to `out`, whatever the bytes of `coded` are.
        """

    def triton_shorten(self, body: str, at: str) -> str:
        """Torch expression of the body with the bytes from `at` on shortened. For GPUs only."""
        raise no_triton(self)

    def triton_expand(self, body: str, at: str, num_bytes: str) -> str:
        """Torch expression of the body with `num_bytes` bytes from `at` on restored; None if they are invalid."""
        raise no_triton(self)


def coding_of(each: Field) -> Coding:
    """The operator that shortens a field."""
    assert each.coding is not None, f"{each.name} is sent as it is packed"
    found = lookup(each.coding.op)
    assert isinstance(found, Coding)
    return found


def no_triton(operator: Operator) -> NotImplementedError:
    """Error for an operator without source for GPUs."""
    return NotImplementedError(f"Operator {operator.name!r} has no source for GPUs. Implement its method `triton`.")


def register(operator: Operator) -> Operator:
    """Register an operator under its name. It replaces one of the same origin.

    Raises:
        ValueError: Another operator has that name.
    """
    known = _OPERATORS.get(operator.name)
    if known is not None and known.origin != operator.origin:
        raise ValueError(f"Operator {operator.name!r} already exists, from {known.origin}. Choose another name.")
    _OPERATORS[operator.name] = operator
    return operator


def lookup(name: str) -> Operator:
    """The operator with this name.

    Raises:
        UnknownNameError: There is none.
    """
    if name not in _OPERATORS:
        raise UnknownNameError("operator", name, _OPERATORS)
    return _OPERATORS[name]


def names() -> list[str]:
    """Names of all operators, sorted."""
    return sorted(_OPERATORS)


def used_operators(program: Program) -> list[str]:
    """Names of CompLL's operators that a program uses, sorted."""
    nodes = [*program.encode_nodes(), *program.decode_nodes()]
    found = {node.op for node in nodes if lookup(node.op).is_collective} | {"concat", "extract"}
    if any(not lookup(node.op).is_collective and node.space.kind in ("elements", "items") for node in nodes):
        found.add("map")
    return sorted(found)


def quietly(function: Any, *args: Any) -> Any:
    """Call a NumPy function without warnings of overflow and division by zero, as compiled code would."""
    with np.errstate(all="ignore"):
        return function(*args)
