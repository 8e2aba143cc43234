"""Checks of the options of a compressor: each returns the value, or raises and says what to do.

A wrong type is an `OptionTypeError`, a value out of range an `OptionError`.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

from gradwire.core.errors import OptionError, OptionTypeError


def real(
    option: str, value: object, low: float, high: float, *, low_open: bool = False, high_open: bool = False
) -> float:
    """Return `value` as a float that lies between `low` and `high`, which belong to the range unless open."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise OptionTypeError(f"Expected {option} to be a number, got {value!r}. Do: {option}={low if low else high}.")
    found = float(value)
    above = found > low if low_open else found >= low
    below = found < high if high_open else found <= high
    if not (above and below):
        left, right = "<" if low_open else "<=", "<" if high_open else "<="
        raise OptionError(
            f"Expected {low:g} {left} {option} {right} {high:g}, got {value!r}. Do: pass a value in that range."
        )
    return found


def integer(option: str, value: object, low: int, high: int) -> int:
    """Return `value` as an int from `low` to `high`, both included."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise OptionTypeError(
            f"Expected {option} to be an integer, got {value!r}. Do: pass an int from {low} to {high}."
        )
    found = int(value)
    if not low <= found <= high:
        raise OptionError(f"Expected {option} from {low} to {high}, got {found}. Do: pass an int in that range.")
    return found


def flag(option: str, value: object) -> bool:
    """Return `value`, which is True or False."""
    if not isinstance(value, bool):
        raise OptionTypeError(f"Expected {option} to be True or False, got {value!r}. Do: pass one of the two.")
    return value


def like(name: str, value: Any, default: Any) -> Any:
    """An option of the type of its default; those that mean the same everywhere in their range."""
    if isinstance(default, bool):
        return flag(name, value)
    if name == "bits":
        if value not in (1, 2, 4, 8):
            raise OptionError(f"Expected bits to be 1, 2, 4 or 8, got {value!r}. Do: choose one of these.")
        return int(value)
    if name == "block":
        return integer(name, value, 8, 1 << 20)
    if name in ("ratio", "sample"):
        return real(name, value, 0.0, 1.0, low_open=True)
    if name == "warmup":
        return integer(name, value, 0, 1 << 53)
    if name in ("threshold", "clip"):
        return real(name, value, 0.0, math.inf, high_open=True)
    if isinstance(default, int):
        return integer(name, value, -(1 << 53), 1 << 53)
    if isinstance(default, float):
        return real(name, value, -math.inf, math.inf)
    return value
