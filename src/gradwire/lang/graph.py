"""The graph of a trace in progress: operators add nodes to it, with the line of the algorithm that asked for them."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.lang.errors import TraceError
from gradwire.lang.ir import Location, Node, Space
from gradwire.lang.operators.base import lookup

_HERE = str(Path(__file__).parent)
_current = threading.local()


class Graph:
    """The nodes of a trace in progress. Equal applications are one node."""

    def __init__(self) -> None:
        self.count = 0
        self.num_random = {False: 0, True: 0}  # calls of random, private and shared
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
    """The innermost line on the stack that is the algorithm's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return location(frame.f_code.co_filename, frame.f_lineno)


def location(file: str, line: int) -> Location:
    """A line of a file, with its text."""
    return Location(Path(file).name, line, linecache.getline(file, line).strip())


def is_users(file: str) -> bool:
    """Whether a file can be an algorithm's: not one of the language's own, of NumPy's or of torch's."""
    return not file.startswith(_HERE) and not any(f"-packages/{name}/" in file for name in ("numpy", "torch"))
