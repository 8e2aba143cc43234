"""Errors for unknown arguments that say where the argument belongs: to a compressor, a plan or an options dataclass."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from gradwire.compressors.base.registry import names, options_of
from gradwire.core.errors import OptionTypeError, nearest

P = ParamSpec("P")
T = TypeVar("T")

_RENAMED = {"piece_elements": "chunk_elements"}
"""Arguments of earlier versions, and their names now."""


def names_unknown_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: an unknown argument raises an `OptionTypeError` that says where it belongs.

    It may be an option of a compressor, or belong to a public class of gradwire that a parameter is annotated with.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for argument, value in kwargs.items():
            if argument not in known:
                given = (*args, *kwargs.values(), *(parameter.default for parameter in known.values()))
                advice = (
                    _renamed(function, argument, value)
                    or _home(function, argument, value)
                    or _advice(argument, value, given, list(known))
                )
                name = function.__qualname__.removesuffix(".__init__")
                raise OptionTypeError(f"{name} has no argument {argument!r}. {advice}")
        return function(*args, **kwargs)

    return call


def _renamed(function: Callable[..., object], argument: str, value: object) -> str | None:
    """Advice if the argument has another name now."""
    new = _RENAMED.get(argument)
    advice = None if new is None else _home(function, new, value)
    return None if advice is None else f"It is now {new}: {advice[0].lower()}{advice[1:]}"


def _home(function: Callable[..., object], argument: str, value: object) -> str | None:
    """Advice if one of the parameters takes a public class of gradwire that has the argument."""
    public = sys.modules["gradwire"].__all__
    hints = get_type_hints(function)
    hints.pop("return", None)
    for parameter, hint in hints.items():
        for kind in get_args(hint) or (hint,):
            if not getattr(kind, "__module__", "").startswith("gradwire.") or kind.__name__ not in public:
                continue
            fields = inspect.signature(kind).parameters
            if argument in fields:
                required = "..., " if next(iter(fields.values())).default is inspect.Parameter.empty else ""
                return f"Pass {parameter}=gradwire.{kind.__name__}({required}{argument}={value!r})."
    return None


def _advice(argument: str, value: object, given: tuple[Any, ...], known: list[str]) -> str:
    methods = [each.partition(":")[0] for each in given if isinstance(each, str)]
    for method in (*methods, *names()):  # the one that was named, the default, or any that has it
        if method in names() and argument in options_of(method):
            return (
                f'Options go with the name of their compressor: "{method}:{argument}={value}", or '
                f'gradwire.make("{method}", {argument}={value!r}).'
            )
    close = nearest(argument, known)
    return f"Did you mean {close!r}?" if close else f"Arguments: {', '.join(known)}."
