"""The intermediate representation: a graph of typed nodes.

A node is one application of an operator. Its *space* says how many values it has: a number known from length and step
alone (`STATIC`), one number for the tensor (`SCALAR`), one for each block, for each element, or for each item of a list
(a sample, the result of a filter). Its *dtype* is `FLOAT`, `BOOL` or the element type it was cast to. A cast value is
still a number, limited to those of the type, and can be computed with.

Elements, blocks and items are float32 and are rounded after each operation. Scalars are float64. The operator `narrow`
rounds a scalar to float32 before it meets elements or enters the payload, so that the encoder computes with the value
that the decoder reads.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gradwire.lang.types import ElementType, float32, uint32

FLOAT: Literal["float"] = "float"
BOOL: Literal["bool"] = "bool"
Dtype = Literal["float", "bool"] | ElementType


@dataclass(frozen=True)
class Location:
    """A line of the user's algorithm."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Space:
    """Number of values of a node, see the module docstring.

    Attributes:
        kind: Kind of space.
        block: Elements per block, for kind ``"blocks"``.
        source: Node that made the list, for kind ``"items"``.
    """

    kind: Literal["static", "scalar", "blocks", "elements", "items"]
    block: int = 0
    source: Node | None = None

    def __str__(self) -> str:
        return {"blocks": f"blocks of {self.block}"}.get(self.kind, self.kind)


# Words of generated code, which cannot be the variable of a field.
_WORDS = """
accumulate at b bodies body count decoded end first grad i inside keys list_counts list_indices list_values lists n one
out rank room room_at scale scratch segment_end sent sizes start static stats stop tile tile_end tl torch
residual_in residual_out total triton v watch words x
"""
RESERVED = frozenset(_WORDS.split())

STATIC, SCALAR, ELEMENTS = Space("static"), Space("scalar"), Space("elements")


@dataclass(frozen=True, eq=False)
class Node:
    """One application of an operator.

    Attributes:
        op: Name of the operator.
        inputs: Nodes it is applied to.
        attrs: Other arguments.
        space, dtype: See the module docstring.
        where: Line of the user's algorithm.
        number: Position in the order of creation, which is a valid order of evaluation.
    """

    op: str
    inputs: tuple[Node, ...]
    attrs: Mapping[str, Any]
    space: Space
    dtype: Dtype
    where: Location
    number: int

    def __repr__(self) -> str:
        arguments = [f"%{node.number}" for node in self.inputs] + [f"{k}={v}" for k, v in self.attrs.items()]
        return f"%{self.number} = {self.op}({', '.join(arguments)}) : {self.dtype} of {self.space}"


@dataclass(frozen=True)
class Field:
    """One entry of the payload, an argument of `concat`.

    Attributes:
        name: Name of the argument, and of the decoder's attribute.
        node: Values.
        coding: Node that shortens the packed bytes, or None. Only the last field may have one.
    """

    name: str
    node: Node
    coding: Node | None = None

    def __str__(self) -> str:
        coding = f" with {self.coding.op}" if self.coding else ""
        return f"{self.name} {self.dtype} of {self.node.space}{coding}"

    @property
    def dtype(self) -> ElementType:
        """Stored element type."""
        if isinstance(self.node.dtype, ElementType):
            return self.node.dtype
        return uint32 if self.node.op == "index" else float32

    @property
    def is_array(self) -> bool:
        return self.node.space.kind != "scalar"

    @property
    def is_positions(self) -> bool:
        """Whether it holds the positions of a list, which are packed as positions."""
        return self.node.op == "index"

    @property
    def variable(self) -> str:
        """Variable in generated code: the name of the field, unless generated code uses that word itself."""
        from gradwire.lang.targets.numba import runtime
        from gradwire.lang.targets.triton import names

        # Generated code derives names from it: q_in, q_of, q_levels. With a trailing underscore none can collide.
        words = (*runtime.__all__, *RESERVED, *names.RESERVED)
        word = any(known == self.name or known.startswith(f"{self.name}_") for known in words)
        return f"{self.name}_" if word or keyword.iskeyword(self.name) else self.name


@dataclass(frozen=True)
class Program:
    """A traced compressor.

    Attributes:
        name: Name of the compressor.
        options: Options it was traced with.
        fields: Payload in the order of its bytes: scalars, arrays by decreasing width, then positions or coded bytes.
        output: Result of the decoder, computed from `extract` nodes.
        stats: The `over_ranks` nodes, scalars to reduce over ranks before encoding.
        num_encode_lines, num_decode_lines: Lines of logic, without docstrings, comments and signatures.
        functions: Number of further functions, including lambdas.
    """

    name: str
    options: Mapping[str, Any]
    fields: tuple[Field, ...]
    output: Node
    stats: tuple[Node, ...]
    num_encode_lines: int = 0
    num_decode_lines: int = 0
    functions: int = 0
    doc: str = field(default="", compare=False)

    def encode_nodes(self) -> list[Node]:
        """All nodes of the encoder, in order of evaluation."""
        return closure([each.coding or each.node for each in self.fields])

    def decode_nodes(self) -> list[Node]:
        """All nodes of the decoder, in order of evaluation."""
        return closure([self.output])

    def field_of(self, node: Node) -> Field:
        """The field that an `extract` node reads."""
        return next(each for each in self.fields if each.name == node.attrs["field"])

    @property
    def items(self) -> Space | None:
        """Space of the payload's lists, or None if it has none."""
        return next((each.node.space for each in self.fields if each.node.space.kind == "items"), None)

    @property
    def has_fixed_size(self) -> bool:
        """Whether all payloads of a tensor have the same length."""
        return self.items is None and self.fields[-1].coding is None


def closure(roots: list[Node]) -> list[Node]:
    """The roots and all nodes they depend on, in order of creation."""
    found: dict[int, Node] = {}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if id(node) not in found:
            found[id(node)] = node
            stack += node.inputs
    return sorted(found.values(), key=lambda node: node.number)
