"""Shared by the emitters: names of values, order of expressions, comments that lead back to the algorithm."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

from gradwire.lang.ir import Field, Location, Node, Program
from gradwire.lang.operators.base import lookup
from gradwire.lang.types import CHUNK, TRIT_CHUNK

INDENT = "    "


class Lines:
    """Source under construction: lines, indentation, and comments with the origin of lines."""

    def __init__(self, indent: int = 0) -> None:
        self.lines: list[str] = []
        self.indent = indent
        self._said: Location | None = None

    def add(self, *lines: str) -> None:
        self.lines += [INDENT * self.indent + line if line else "" for line in lines]

    def say(self, where: Location) -> None:
        """Add a comment with the line of the algorithm, unless the last comment was the same."""
        if where.text and where != self._said:
            self.add(f"# {where}: {where.text}")
        self._said = where

    def forget(self) -> None:
        """Comment the next line's origin even if the last comment was the same."""
        self._said = None

    @contextlib.contextmanager
    def block(self, header: str) -> Iterator[None]:
        """Indent what is added in the ``with`` block, below a header such as ``for ...:``."""
        self.add(header)
        self.indent += 1
        yield
        self.indent -= 1

    def __str__(self) -> str:
        return "\n".join(self.lines)


def name_nodes(program: Program) -> dict[int, str]:
    """Variable names of nodes: the name of the field, else of the operator with the node's number."""
    names: dict[int, str] = {}
    for node in (*program.encode_nodes(), *program.decode_nodes()):
        names[id(node)] = f"{node.attrs.get('function', node.op)}_{node.number}"
    for each in program.fields:
        names[id(each.node)] = each.variable
    for node in program.decode_nodes():
        if node.op == "extract":
            names[id(node)] = program.field_of(node).variable
    return names


def is_local(node: Node) -> bool:
    """Whether a node is computed in each step of a sweep."""
    return node.space.kind in ("elements", "items") and not lookup(node.op).is_collective


def shared_subexpressions(roots: Iterable[Node]) -> list[Node]:
    """Arithmetic nodes of a sweep that are used more than once, in order. They get a variable."""
    roots = list(roots)
    uses: Counter[int] = Counter(id(node) for node in roots)
    nodes = _within_sweep(roots)
    for node in nodes:
        if is_local(node):
            uses.update(id(each) for each in node.inputs)
    leaves = ("gradient", "extract", "constant", "index", "value", "random")
    return [node for node in nodes if is_local(node) and uses[id(node)] > 1 and node.op not in leaves]


def _within_sweep(roots: list[Node]) -> list[Node]:
    """The nodes of one step of a sweep, without those that lists and scalars were computed from earlier."""
    found: dict[int, Node] = {}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if id(node) not in found:
            found[id(node)] = node
            stack += node.inputs if is_local(node) else ()
    return sorted(found.values(), key=lambda node: node.number)


def statics(program: Program) -> list[Node]:
    """The numbers known from length and step that generated code needs: its argument `static`, in order."""
    found: dict[int, Node] = {}
    for node in (*program.encode_nodes(), *program.decode_nodes()):
        for each in node.inputs:
            if each.space.kind == "static" and each.op != "constant" and node.space.kind != "static":
                found[id(each)] = each
    return list(found.values())


def chunk_of(fields: Iterable[Field]) -> int:
    """Elements per chunk in a sweep over these fields."""
    return TRIT_CHUNK if any(each.dtype.packing == "digits" for each in fields) else CHUNK


class GeneratedFunction:
    """A function being emitted.

    Attributes:
        program: Program.
        names: Variables of nodes, by id.
        static: Source of the numbers known from length and step, by id of their node.
        lines: Source.
        replaced: The encoder's own nodes for fields of the payload, see `as_receiver`.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names = name_nodes(program)
        self.static = {id(node): f"static[{k}]" for k, node in enumerate(statics(program))}
        self.lines = Lines()
        self.replaced: dict[str, Node] = {}

    @contextlib.contextmanager
    def as_receiver(self) -> Iterator[None]:
        """Evaluate the decoder within the encoder: fields of the payload are replaced by the encoder's own nodes."""
        self.replaced = {each.name: each.node for each in self.program.fields}
        yield
        self.replaced = {}

    def resolved(self, node: Node) -> Node:
        """The encoder's own node for a field of the payload, within `as_receiver`; else the node itself."""
        return self.replaced.get(node.attrs["field"], node) if node.op == "extract" else node

    def list_name(self, node: Node) -> str:
        """The variable of a list, or of its values or positions."""
        if node.op in ("value", "index"):
            return f"{self.names[id(node.inputs[0])]}_{node.op}"
        return self.names[id(node)]
