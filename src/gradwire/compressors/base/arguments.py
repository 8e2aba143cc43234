"""What is said of arguments that a call does not have: most of them are options of a compressor."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from gradwire.compressors.base.registry import names, options_of
from gradwire.core.errors import OptionTypeError, nearest

P = ParamSpec("P")
T = TypeVar("T")


def names_unknown_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: an argument that `function` does not have raises an `OptionTypeError` that says where it belongs."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for argument, value in kwargs.items():
            if argument not in known:
                given = (*args, *kwargs.values(), *(parameter.default for parameter in known.values()))
                advice = _advice(argument, value, given, list(known))
                name = function.__qualname__.removesuffix(".__init__")
                raise OptionTypeError(f"{name} has no argument {argument!r}. {advice}")
        return function(*args, **kwargs)

    return call


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
