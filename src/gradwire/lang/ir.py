"""The intermediate representation: a graph of typed nodes.

A node is one application of an operator. Its *space* says what it has a value for: a number known from length and step
alone (`STATIC`), one number a tensor (`SCALAR`), one a block, one an element, or one an item of a list that the
algorithm made (a sample, the survivors of a filter). Its *dtype* is `FLOAT`, `BOOL` or an element type to which it
was cast; a cast value is still a number that fits the type, so that it can be computed with.

Elements, blocks and items are float32, every operation rounded once. Scalars are float64, and are rounded to
float32 by the one operator `narrow` where they meet elements or enter the payload: what an encoder computes with is
what the decoder will read.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gradwire.lang.types import ElementType

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
    """What a node has a value for.

    Attributes:
        kind: one of the kinds of the module's docstring.
        block: elements a block, for kind ``"blocks"``.
        source: the node that made the list, for kind ``"items"``.
    """

    kind: Literal["static", "scalar", "blocks", "elements", "items"]
    block: int = 0
    source: Node | None = None

    def __str__(self) -> str:
        return {"blocks": f"blocks of {self.block}"}.get(self.kind, self.kind)


# Words of generated code that no field can have as a variable.
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
        op: name of the operator.
        inputs: the nodes it is applied to.
        attrs: its other arguments.
        space, dtype: see the module's docstring.
        where: the line of the user's algorithm that it comes from.
        number: position in the order of creation, which is an order of evaluation.
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
    """One entry of the payload: what `concat` was given under a name.

    Attributes:
        name: by which the decoder knows it.
        node: its values.
        coding: the node that shortens its bytes once they are packed, or None; the last field may have one.
    """

    name: str
    node: Node
    coding: Node | None = None

    def __str__(self) -> str:
        coding = f" with {self.coding.op}" if self.coding else ""
        return f"{self.name} {self.dtype} of {self.node.space}{coding}"

    @property
    def dtype(self) -> ElementType:
        """How it is stored."""
        from gradwire.lang.types import float32, uint32

        if isinstance(self.node.dtype, ElementType):
            return self.node.dtype
        return uint32 if self.node.op == "index" else float32

    @property
    def is_array(self) -> bool:
        return self.node.space.kind != "scalar"

    @property
    def is_positions(self) -> bool:
        """Whether it is the positions of a list, which travel in few bits."""
        return self.node.op == "index"

    @property
    def variable(self) -> str:
        """Its name in generated code: its own, unless that means something there already."""
        from gradwire.lang.targets.numba import runtime
        from gradwire.lang.targets.triton import names

        # Generated code appends to it: q_in, q_of, q_levels. With an underscore of its own at the end it meets no word.
        words = (*runtime.__all__, *RESERVED, *names.RESERVED)
        word = any(known == self.name or known.startswith(f"{self.name}_") for known in words)
        return f"{self.name}_" if word or keyword.iskeyword(self.name) else self.name


@dataclass(frozen=True)
class Program:
    """A traced compressor.

    Attributes:
        name: of the compressor.
        options: with which it was traced.
        fields: the payload, in its order: scalars first, then arrays by falling width, last what is coded or positions.
        output: the decoder's result, over `extract` nodes.
        stats: the `over_ranks` nodes, each a scalar to reduce over ranks before encoding.
        num_encode_lines, num_decode_lines: lines of logic, without docstrings, comments and signatures.
        functions: how many functions besides the two, lambdas counted.
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
        """All nodes of the encoder, in an order of evaluation."""
        return closure([each.coding or each.node for each in self.fields])

    def decode_nodes(self) -> list[Node]:
        """All nodes of the decoder, in an order of evaluation."""
        return closure([self.output])

    def field_of(self, node: Node) -> Field:
        """The field that an `extract` node reads."""
        return next(each for each in self.fields if each.name == node.attrs["field"])

    @property
    def items(self) -> Space | None:
        """The space of the payload's lists, or None where it has none."""
        return next((each.node.space for each in self.fields if each.node.space.kind == "items"), None)

    @property
    def has_fixed_size(self) -> bool:
        """Whether all payloads of one tensor have one length."""
        return self.items is None and self.fields[-1].coding is None


def closure(roots: list[Node]) -> list[Node]:
    """The nodes that the roots depend on, themselves included, in order of creation."""
    found: dict[int, Node] = {}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if id(node) not in found:
            found[id(node)] = node
            stack += node.inputs
    return sorted(found.values(), key=lambda node: node.number)
