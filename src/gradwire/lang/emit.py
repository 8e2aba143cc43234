"""What the emitters share: names of values, the order of expressions, comments that lead back to the algorithm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gradwire.lang.ir import Field, Location, Node, Program
from gradwire.lang.operators.base import lookup
from gradwire.lang.types import CHUNK, TRIT_CHUNK

INDENT = "    "


class Lines:
    """Source under construction: lines, indentation, and the comment of the line that comes next."""

    def __init__(self, indent: int = 0) -> None:
        self.lines: list[str] = []
        self.indent = indent
        self._said: Location | None = None

    def add(self, *lines: str) -> None:
        self.lines += [INDENT * self.indent + line if line else "" for line in lines]

    def say(self, where: Location) -> None:
        """Comment with the line of the algorithm, unless the last comment was that."""
        if where.text and where != self._said:
            self.add(f"# {where}: {where.text}")
        self._said = where

    def forget(self) -> None:
        """Say the next line's origin even if it was said last."""
        self._said = None

    def block(self, header: str) -> Block:
        """``with lines.block("for ..."):``."""
        return Block(self, header)

    def __str__(self) -> str:
        return "\n".join(self.lines)


class Block:
    """An indented block."""

    def __init__(self, lines: Lines, header: str) -> None:
        self.lines, self.header = lines, header

    def __enter__(self) -> None:
        self.lines.add(self.header)
        self.lines.indent += 1

    def __exit__(self, *_: object) -> None:
        self.lines.indent -= 1


def name_nodes(program: Program) -> dict[int, str]:
    """A name for each node that gets a variable: its field's, else its operator's with its number."""
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
    """Whether a node is computed anew in each step of a sweep."""
    return node.space.kind in ("elements", "items") and not lookup(node.op).is_collective


def shared_subexpressions(roots: Iterable[Node]) -> list[Node]:
    """The arithmetic nodes of a sweep used more than once, in order: they get a variable."""
    roots = list(roots)
    uses: Counter[int] = Counter(id(node) for node in roots)
    nodes = _within_sweep(roots)
    for node in nodes:
        if is_local(node):
            uses.update(id(each) for each in node.inputs)
    leaves = ("gradient", "extract", "constant", "index", "value", "random")
    return [node for node in nodes if is_local(node) and uses[id(node)] > 1 and node.op not in leaves]


def _within_sweep(roots: list[Node]) -> list[Node]:
    """What is computed anew in each step: not what a list or a scalar was made of before."""
    found: dict[int, Node] = {}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if id(node) not in found:
            found[id(node)] = node
            stack += node.inputs if is_local(node) else ()
    return sorted(found.values(), key=lambda node: node.number)


def statics(program: Program) -> list[Node]:
    """The numbers that follow from length and step and that generated code needs, in order: its argument `static`."""
    found: dict[int, Node] = {}
    for node in (*program.encode_nodes(), *program.decode_nodes()):
        for each in node.inputs:
            if each.space.kind == "static" and each.op != "constant" and node.space.kind != "static":
                found[id(each)] = each
    return list(found.values())


def chunk_of(fields: Iterable[Field]) -> int:
    """Elements that a sweep over these fields takes at a time."""
    return TRIT_CHUNK if any(each.dtype.packing == "digits" for each in fields) else CHUNK
