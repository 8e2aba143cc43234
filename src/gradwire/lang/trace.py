"""Tracing: run the two functions of an algorithm once on symbols to get a program."""

from __future__ import annotations

import ast
import inspect
import textwrap
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from gradwire.lang.errors import TraceError
from gradwire.lang.graph import Graph, is_users, location, tracing
from gradwire.lang.ir import Location, Program, closure
from gradwire.lang.operators.extract import Extract  # noqa: F401 - registers what traces begin with
from gradwire.lang.payload import PayloadField, SymbolicPayload
from gradwire.lang.symbols import Value, lift
from gradwire.lang.verify import verify

_REMEDY = (
    "use what gradwire.lang exports instead of functions of Python, NumPy and torch; encode takes the gradient and "
    "the options, decode the payload and the options that it names"
)


def trace(
    name: str, encode: Callable[..., Any], decode: Callable[..., Any], options: Mapping[str, Any], doc: str = ""
) -> Program:
    """Trace a compressor with these options.

    Args:
        name: Name of the compressor.
        encode: Takes a symbolic gradient and the options; returns `concat(...)`.
        decode: Takes a payload and the options named in its signature; returns one value per element.
        options: Options by name.
        doc: Documentation for the generated source.

    Raises:
        TraceError: The language cannot express the algorithm. The message says where, and what to write instead.
    """
    with tracing(Graph()) as graph:
        payload = _called(encode, Value(graph.add("gradient", (), signature_line(encode))), options)
        if not isinstance(payload, SymbolicPayload):
            raise TraceError(
                f"encode must return concat(...), got {type(payload).__name__}", signature_line(encode),
                "return concat(scale=scale, q=q)",
            )  # fmt: skip
        fields = {
            each.name: Value(
                graph.add("extract", (), each.node.where, field=each.name, space=each.node.space, dtype=each.node.dtype)
            )
            for each in payload.fields
        }
        graph.num_random = dict.fromkeys(graph.num_random, 0)
        known = inspect.signature(decode).parameters
        output = _called(decode, PayloadField(fields), {key: value for key, value in options.items() if key in known})
        if output is None:
            raise TraceError(
                "decode must return one value per element, got None", signature_line(decode),
                "return p.q.map(lambda q: q * p.scale)",
            )  # fmt: skip
        output = lift(output).node
    stats = [node for node in closure([each.node for each in payload.fields]) if node.op == "over_ranks"]
    program = Program(
        name, dict(options), payload.fields, output, tuple(stats), _num_lines(encode), _num_lines(decode),
        _num_functions(encode) + _num_functions(decode), doc,
    )  # fmt: skip
    verify(program)
    return program


def _called(function: Callable[..., Any], first: Any, options: Mapping[str, Any]) -> Any:
    """Call a function of the user. Errors that Python raises for symbols get the line of the algorithm."""
    try:
        return function(first, **options)
    except TraceError:
        raise
    except (TypeError, AttributeError) as error:
        lines = [
            (frame.f_code.co_filename, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if is_users(frame.f_code.co_filename)
        ]
        where = location(*lines[-1]) if lines else signature_line(function)
        raise TraceError(f"Cannot trace {function.__name__}: {error}", where, _REMEDY) from error


def signature_line(function: Callable[..., Any]) -> Location:
    """First line of a function: the place of an error that belongs to no single line."""
    code = getattr(function, "__code__", None)
    if code is None:
        return Location("?", 0, repr(function))
    return Location(code.co_filename.rsplit("/", 1)[-1], code.co_firstlineno, f"def {function.__name__}")


def _tree(function: Callable[..., Any]) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None  # entered at a prompt


def _num_lines(function: Callable[..., Any]) -> int:
    """Lines of a function with signature and decorator, without docstrings, comments and empty lines."""
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
    """Number of functions within a function, without those in its decorators, which are no logic."""
    tree = _tree(function)
    if tree is None:
        return 0
    body = tree.body[0].body if isinstance(tree.body[0], ast.FunctionDef) else [tree]
    return sum(isinstance(node, (ast.Lambda, ast.FunctionDef)) for each in body for node in ast.walk(each))


__all__ = ["signature_line", "trace"]
