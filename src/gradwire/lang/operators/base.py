"""What an operator is: a shape rule, a NumPy reference, and an emitter a backend.

There are four sorts, by where their code stands in a generated function:

- `Arithmetic` gives an expression, for one element or for a scalar;
- `Sink` takes in the elements of a sweep and leaves a scalar or a list: code before, inside and after the loop;
- `Statement` stands between sweeps;
- `Coding` stands after the sweeps of an encoder, where it shortens what they packed, and before those of a decoder.

To add one, derive from the fitting class in a file of your own and call `register`; docs/extend.md shows how.
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
    """Inputs that an operator does not take.

    Attributes:
        remedy: what to write instead.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


class Operator(ABC):
    """Base of all operators.

    Attributes:
        name: as nodes and messages call it.
        is_collective: whether it is one of CompLL's operators, or of the same rank; else it is arithmetic.
    """

    name: ClassVar[str]
    is_collective: ClassVar[bool] = True

    @property
    def origin(self) -> str:
        """Who defined it: the same again may take its name."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    @abstractmethod
    def infer(self, inputs: Sequence[Node], attrs: Mapping[str, Any]) -> tuple[Space, Dtype]:
        """The shape rule: space and type of the result. Raises `FitError` where the inputs do not fit."""

    @abstractmethod
    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        """The value by NumPy, plain and slow: what every backend must give, bit for bit.

        Args:
            node: the application.
            inputs: values of its inputs; elements, blocks and items are float32 arrays (bool for masks), scalars
                float64.
            env: the `gradwire.lang.interpret.Environment` of the call: size, keys, offset.
        """


@dataclass
class Emission:
    """Lines of a sink, each list indented from its own zero.

    Attributes:
        before: before the loop over chunks.
        chunk: at the start of a chunk of 1024 elements.
        inside: in the loop over vectors.
        end: at the end of a chunk.
        after: after the loop.
    """

    before: list[str] = field(default_factory=list)
    chunk: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


@dataclass
class DeviceEmission:
    """Lines of a sink for a GPU: of the kernel, and of the host function that starts it.

    Attributes:
        parts: tensors with one value a chunk, by name, and their torch types.
        inside: in the kernel; the number of its chunk is `chunk`.
        after: on the host, after the kernel.
        again: in a second kernel over the same elements, after that.
        outputs: the variables of the host that the second kernel takes.
        before: on the host, before the kernel.
        takes: the variables of the host that the kernel takes besides its elements and `parts`.
    """

    parts: dict[str, str]
    inside: list[str]
    after: list[str]
    again: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    takes: list[str] = field(default_factory=list)


class Sink(Operator):
    """An operator that takes in elements as a sweep passes over them."""

    @abstractmethod
    def cpu(self, node: Node, name: str, value: str, mask: str | None) -> Emission:
        """Numba source that leaves its result in the variable `name`.

        Args:
            value: expression of the vector of this step; float32, or a mask for filters.
            mask: variable with the mask of lanes that count, or None where all up to the end do.
        """

    def triton(self, node: Node, name: str, value: str, chosen: str) -> DeviceEmission:
        """Triton and torch source that leaves its result in the host's variable `name`; for GPUs only.

        Args:
            value: variable of the kernel with the values of a chunk.
            chosen: variable with the mask of lanes that count.
        """
        raise no_triton(self)


class Statement(Operator):
    """An operator that stands between sweeps."""

    @abstractmethod
    def cpu(self, node: Node, name: str, inputs: Sequence[str]) -> list[str]:
        """Numba source that leaves its result in the variable `name`."""

    def triton(self, node: Node, name: str, inputs: Sequence[str]) -> list[str]:
        """Torch source that leaves its result in the variable `name`; for GPUs only."""
        raise no_triton(self)


class Coding(Operator):
    """An operator on bytes: it shortens the last packed array of a payload, and loses nothing.

    It changes no value, so sweeps pack and unpack as without it. A body has no more bytes than without it.
    """

    def reference(self, node: Node, inputs: Sequence[Any], env: Any) -> Any:
        return inputs[0]

    @abstractmethod
    def shorten(self, packed: np.ndarray) -> np.ndarray:
        """What travels in place of these bytes, by NumPy; not longer than they are."""

    @abstractmethod
    def expand(self, coded: np.ndarray, num_bytes: int) -> np.ndarray | None:
        """The packed bytes again; None where `coded` is not what `shorten` makes of so many bytes."""

    @abstractmethod
    def cpu_shorten(self, packed: str, out: str) -> str:
        """Numba expression that writes what travels to the bytes `out`, as many as `packed`; gives its length."""

    @abstractmethod
    def cpu_expand(self, coded: str, out: str) -> str:
        """Numba expression that fills `out` with the packed bytes; below 0 where `coded` is not from there.

        Source writes to nothing but `out`, whatever `coded` holds.
        """

    def triton_shorten(self, body: str, at: str) -> str:
        """Torch expression of a body whose bytes from `at` on are shortened; for GPUs only."""
        raise no_triton(self)

    def triton_expand(self, body: str, at: str, num_bytes: str) -> str:
        """Torch expression of the body that has so many bytes from `at` on again; None for what is not from there."""
        raise no_triton(self)


def coding_of(each: Field) -> Coding:
    """The operator that shortens a field."""
    assert each.coding is not None, f"{each.name} travels as it is packed"
    found = lookup(each.coding.op)
    assert isinstance(found, Coding)
    return found


def no_triton(operator: Operator) -> NotImplementedError:
    """What to raise where an operator has no source for GPUs."""
    return NotImplementedError(
        f"Expected source for GPUs of {operator.name!r}, got none. Do: write its method `triton`."
    )


def register(operator: Operator) -> Operator:
    """Make an operator known under its name; the same of the same module replaces it.

    Raises:
        ValueError: another has that name.
    """
    known = _OPERATORS.get(operator.name)
    if known is not None and known.origin != operator.origin:
        raise ValueError(
            f"Expected a new operator, got {operator.name!r} of {known.origin}. Do: choose another name."
        )  # fmt: skip
    _OPERATORS[operator.name] = operator
    return operator


def lookup(name: str) -> Operator:
    """The operator of a name.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in _OPERATORS:
        raise UnknownNameError("operator", name, _OPERATORS)
    return _OPERATORS[name]


def names() -> list[str]:
    """All operators, sorted."""
    return sorted(_OPERATORS)


def used_operators(program: Program) -> list[str]:
    """CompLL's operators that a program uses, sorted."""
    nodes = [*program.encode_nodes(), *program.decode_nodes()]
    found = {node.op for node in nodes if lookup(node.op).is_collective} | {"concat", "extract"}
    if any(not lookup(node.op).is_collective and node.space.kind in ("elements", "items") for node in nodes):
        found.add("map")
    return sorted(found)


def quietly(function: Any, *args: Any) -> Any:
    """Call a NumPy function as compiled code would: overflow and division by zero without a warning."""
    with np.errstate(all="ignore"):
        return function(*args)
