"""The register of checks, and what they say when they fail."""

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
        name: of its function, with dashes.
        function: takes a codec.
        applies: whether the contract asks it of a codec.
    """

    name: str
    function: Callable[[Compressor], None]
    applies: Applies

    @property
    def summary(self) -> str:
        """The first line of its documentation."""
        return (self.function.__doc__ or "").strip().split("\n")[0]


@dataclass(frozen=True)
class CheckOutcome:
    """What came of a check: an error, or None; `seconds` that it took."""

    check: Check
    error: Exception | None
    seconds: float


CHECKS: list[Check] = []


def check(applies: Applies = lambda codec: True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: register a function as a check of the codecs for which `applies` holds."""

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        CHECKS.append(Check(function.__name__.replace("_", "-"), function, applies))
        return function

    return wrap


def run(codec: Compressor, checks: list[Check] | None = None) -> Iterator[CheckOutcome]:
    """Run the checks that apply to a codec, one after the other."""
    for each in CHECKS if checks is None else checks:
        if each.applies(codec):
            begin = time.perf_counter()
            error = _error_of(each, codec)
            yield CheckOutcome(each, error, time.perf_counter() - begin)


def _error_of(each: Check, codec: Compressor) -> Exception | None:
    try:
        each.function(codec)
    except Exception as error:
        return error
    return None


def expect(condition: object, message: str) -> None:
    """Fail unless the condition holds. Unlike `assert` it is there under ``python -O`` too."""
    if not condition:
        raise AssertionError(message)


@contextmanager
def about(what: object) -> Iterator[None]:
    """Say for which case a check failed, or what raised."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{what}: raised {type(error).__name__}: {error}") from error


@contextmanager
def refusal(kind: type[Exception], pattern: str = "") -> Iterator[None]:
    """Fail unless the block raises such an error with such a message."""
    try:
        yield
    except kind as error:
        if not re.search(pattern, str(error)):
            raise AssertionError(f"Expected the message to say {pattern!r}, got {str(error)!r}") from error
        return
    raise AssertionError(f"Expected {kind.__name__}, nothing was raised")
