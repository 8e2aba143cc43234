"""The graph of a trace in progress. Operators add nodes to it, each with its line of the algorithm."""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradwire.lang.errors import TraceError
from gradwire.lang.ir import Location, Node, Space
from gradwire.lang.operators.base import lookup

_HERE = str(Path(__file__).parent)
_current = threading.local()


class Graph:
    """Nodes of a trace in progress. Equal applications share one node."""

    def __init__(self) -> None:
        self.count = 0
        self.num_random = {False: 0, True: 0}  # calls of random, private and shared
        self.known: dict[Any, Node] = {}

    def add(self, op: str, inputs: Sequence[Node], where: Location | None = None, **attrs: Any) -> Node:
        where = where or user_location()
        try:
            space, dtype = lookup(op).infer(inputs, attrs)
        except ValueError as error:
            raise TraceError(f"Cannot apply {op}: {error}", where, getattr(error, "remedy", "")) from None
        key = (op, tuple(map(id, inputs)), tuple(sorted((k, repr(v)) for k, v in attrs.items())))
        if key not in self.known:
            self.count += 1
            node = Node(op, tuple(inputs), attrs, space, dtype, where, self.count)
            if space.kind == "items" and space.source is None:
                object.__setattr__(node, "space", Space("items", source=node))
            self.known[key] = node
        return self.known[key]


@contextlib.contextmanager
def tracing(graph: Graph) -> Iterator[Graph]:
    """Add the operations on symbols to this graph."""
    _current.graph = graph
    try:
        yield graph
    finally:
        _current.graph = None


def graph() -> Graph:
    """The graph of the trace in progress."""
    found: Graph | None = getattr(_current, "graph", None)
    if found is None:
        raise TraceError(
            "Symbolic values exist only in the encode and decode functions of a compressor", user_location(),
            "call this inside a function decorated with gradwire.compressor",
        )  # fmt: skip
    return found


def user_location() -> Location:
    """The innermost line of the algorithm on the stack."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return location(frame.f_code.co_filename, frame.f_lineno)


def location(file: str, line: int) -> Location:
    """A line of a file, with its text."""
    return Location(Path(file).name, line, linecache.getline(file, line).strip())


def is_users(file: str) -> bool:
    """Whether a file can belong to an algorithm: not to the language, NumPy or torch."""
    return not file.startswith(_HERE) and not any(f"-packages/{name}/" in file for name in ("numpy", "torch"))
