"""The registry of checks, and helpers for their error messages."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gradwire.compressors.base import Compressor

Applies = Callable[[Compressor], bool]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: Name of the function, with dashes.
        function: Function of a compressor that raises `AssertionError` if the check fails.
        applies: Whether the check applies to a compressor.
    """

    name: str
    function: Callable[[Compressor], None]
    applies: Applies

    @property
    def summary(self) -> str:
        """First line of the function's docstring."""
        return (self.function.__doc__ or "").strip().split("\n")[0]


@dataclass(frozen=True)
class CheckOutcome:
    """Result of a check.

    Attributes:
        check: The check.
        error: What it raised, or None.
        seconds: Its duration.
    """

    check: Check
    error: Exception | None
    seconds: float


CHECKS: list[Check] = []


def check(applies: Applies = lambda codec: True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: register a function as a check for the compressors that `applies` accepts."""

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        CHECKS.append(Check(function.__name__.replace("_", "-"), function, applies))
        return function

    return wrap


def run(codec: Compressor, checks: list[Check] | None = None) -> Iterator[CheckOutcome]:
    """Run the checks that apply to a compressor, and yield each outcome."""
    for each in CHECKS if checks is None else checks:
        if each.applies(codec):
            begin, error = time.perf_counter(), None
            try:
                each.function(codec)
            except Exception as raised:
                error = raised
            yield CheckOutcome(each, error, time.perf_counter() - begin)


def expect(condition: object, message: str) -> None:
    """Fail unless the condition holds, even under ``python -O``."""
    if not condition:
        raise AssertionError(message)


@contextmanager
def about(what: object) -> Iterator[None]:
    """Prefix the error of a failed check with its case."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{what}: raised {type(error).__name__}: {error}") from error


@contextmanager
def refusal(kind: type[Exception], pattern: str = "") -> Iterator[None]:
    """Fail unless the block raises this kind of error with a message that matches."""
    try:
        yield
    except kind as error:
        if not re.search(pattern, str(error)):
            raise AssertionError(f"the message should say {pattern!r}, but is {str(error)!r}") from error
        return
    raise AssertionError(f"no {kind.__name__} was raised")
