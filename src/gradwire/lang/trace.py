"""Tracing: an algorithm's two functions, run once over symbols, become a program."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from gradwire.lang.errors import TraceError
from gradwire.lang.ir import Location, Node, Program, closure, verify
from gradwire.lang.operators.extract import Extract  # noqa: F401 - registers what traces begin with
from gradwire.lang.symbols import Graph, Message, Payload, Value, lift, tracing


def trace(
    name: str, encode: Callable[..., Any], decode: Callable[..., Any], options: Mapping[str, Any], doc: str = ""
) -> Program:
    """Trace a compressor with these options.

    Args:
        name: of the compressor.
        encode: takes a symbolic gradient and the options; returns `concat(...)`.
        decode: takes a message and those of the options that its signature names; returns a value an element.
        options: by name.
        doc: kept in the generated source.

    Raises:
        TraceError: the algorithm does what the language cannot express; says where, and what to do.
    """
    with tracing(Graph()) as graph:
        payload = encode(Value(graph.add("gradient", (), _signature_line(encode))), **options)
        if not isinstance(payload, Payload):
            raise TraceError(
                f"Expected encode to return concat(...), got {type(payload).__name__}", _signature_line(encode),
                "return concat(scale=scale, q=q)",
            )  # fmt: skip
        fields = {
            each.name: Value(
                graph.add("extract", (), each.node.where, field=each.name, space=each.node.space, dtype=each.node.dtype)
            )
            for each in payload.fields
        }
        known = inspect.signature(decode).parameters
        output = decode(Message(fields), **{key: value for key, value in options.items() if key in known})
        output = lift(output).node
    stats = [node for node in closure([each.node for each in payload.fields]) if node.op == "over_ranks"]
    program = Program(
        name, dict(options), payload.fields, output, tuple(stats), _num_lines(encode), _num_lines(decode),
        _num_functions(encode) + _num_functions(decode), doc,
    )  # fmt: skip
    verify(program)
    _verify_side_values(program)
    return program


def _verify_side_values(program: Program) -> None:
    for each in program.fields:
        if not each.is_array and each.node.op != "narrow":
            raise AssertionError(f"{each.name} enters the payload without being rounded")


def _signature_line(function: Callable[..., Any]) -> Location:
    code = getattr(function, "__code__", None)
    if code is None:
        return Location("?", 0, repr(function))
    return Location(code.co_filename.rsplit("/", 1)[-1], code.co_firstlineno, f"def {function.__name__}")


def _tree(function: Callable[..., Any]) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None  # typed at a prompt


def _num_lines(function: Callable[..., Any]) -> int:
    """Lines of a function with its signature and decorator, without docstrings, comments and empty lines."""
    tree = _tree(function)
    if tree is None:
        return 0
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue
        if isinstance(node, (ast.stmt, ast.expr)) and not isinstance(node, ast.FunctionDef):
            lines |= {node.lineno, node.end_lineno or node.lineno}
        if isinstance(node, ast.FunctionDef):
            lines.add(node.lineno)
    documented = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return len(lines - documented)


def _num_functions(function: Callable[..., Any]) -> int:
    tree = _tree(function)
    return sum(isinstance(node, ast.Lambda) for node in ast.walk(tree)) if tree is not None else 0


__all__ = ["Node", "trace"]
