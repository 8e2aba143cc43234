"""Checks of compressor options. Each returns the value, or raises an error that says which values are valid.

A wrong type raises `OptionTypeError`, a value out of range `OptionError`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

from gradwire.core.errors import OptionError, OptionTypeError


def real(
    option: str, value: object, low: float, high: float, *, low_open: bool = False, high_open: bool = False
) -> float:
    """Return `value` as a float from `low` to `high`; an open end is excluded."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise OptionTypeError(f"{option} must be a number, not {value!r}.")
    found = float(value)
    above = found > low if low_open else found >= low
    below = found < high if high_open else found <= high
    if not (above and below):
        left, right = "<" if low_open else "<=", "<" if high_open else "<="
        raise OptionError(f"{option} must be in the range {low:g} {left} {option} {right} {high:g}, but is {value!r}.")
    return found


def integer(option: str, value: object, low: int, high: int) -> int:
    """Return `value` as an int from `low` to `high`, both included."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise OptionTypeError(f"{option} must be an integer from {low} to {high}, not {value!r}.")
    found = int(value)
    if not low <= found <= high:
        raise OptionError(f"{option} must be from {low} to {high}, not {found}.")
    return found


def flag(option: str, value: object) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise OptionTypeError(f"{option} must be True or False, not {value!r}.")
    return value


def choice(option: str, value: object, choices: Sequence[str]) -> str:
    """Return `value` if it is one of the choices."""
    if isinstance(value, str) and value in choices:
        return value
    error = OptionError if isinstance(value, str) else OptionTypeError
    raise error(f"{option} must be one of {', '.join(map(repr, choices))}, not {value!r}.")


def like(name: str, value: Any, default: Any) -> Any:
    """Check an option by the type of its default, and by its range if its name has one meaning everywhere."""
    if isinstance(default, bool):
        return flag(name, value)
    if name == "bits":
        found = integer(name, value, 1, 8)
        if found not in (1, 2, 4, 8):
            raise OptionError(f"bits must be 1, 2, 4 or 8, not {value!r}.")
        return found
    if name == "block" and not value == default == 0:  # 0 stands for the whole tensor
        return integer(name, value, 8, 1 << 20)
    if name in ("ratio", "sample"):
        return real(name, value, 0.0, 1.0, low_open=True)
    if name == "load":
        return real(name, value, 0.0, 16.0, low_open=True)
    if name == "warmup":
        return integer(name, value, 0, 1 << 53)
    if name in ("threshold", "clip"):
        return real(name, value, 0.0, math.inf, high_open=True)
    if isinstance(default, int):
        return integer(name, value, -(1 << 53), 1 << 53)
    if isinstance(default, float):
        return real(name, value, -math.inf, math.inf)
    return value
