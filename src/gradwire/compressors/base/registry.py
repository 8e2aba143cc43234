"""The registry: compressors by name, options by name, and the number that stands for a name on the wire.

The wire number is a hash of the name, so that it does not depend on the order of registration and a
compressor that a user registers has the same number on every rank. Two names with one number are refused at
registration.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from typing import Any, TypeVar

import google_crc32c
import torch

from gradwire.compressors.base import Compressor
from gradwire.core.errors import OptionError, OptionTypeError, UnknownNameError, nearest

_COMPRESSORS: dict[str, type[Compressor]] = {}
_NAMES_BY_CODE: dict[int, str] = {}

C = TypeVar("C", bound=type[Compressor])


@dataclass(frozen=True)
class Description:
    """What a user wants to know of a compressor before choosing it.

    Attributes:
        name: the name for `make`.
        summary: its first line of documentation.
        options: default value of each option, by name.
        code: its number on the wire.
        default: an instance with default options, which carries the algebra.
    """

    name: str
    summary: str
    options: dict[str, Any]
    code: int
    default: Compressor


def register(compressor: C) -> C:
    """Make a compressor known under its `name`. Works as a decorator; returns the class.

    A class of the same module and qualified name replaces the older one, so that a notebook cell can run
    twice.

    Raises:
        TypeError: not a subclass of `Compressor`, or an option has no default.
        ValueError: the name is taken, is not an identifier in lower case, or its wire number is taken.
    """
    if not (isinstance(compressor, type) and issubclass(compressor, Compressor)):
        raise TypeError(f"Expected a subclass of gradwire's Compressor, got {compressor!r}. Do: derive from it.")
    name = getattr(compressor, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(
            f"Expected a name of lower case letters, digits and _, got {name!r} "
            f"(in {compressor.__qualname__}). Do: set `name` in the class."
        )
    _defaults(compressor)
    known = _COMPRESSORS.get(name)
    if known is not None and _identity(known) != _identity(compressor):
        raise ValueError(f"Expected a new name, got {name!r} of {_identity(known)}. Do: choose another name.")
    number = _hash(name)
    holder = _NAMES_BY_CODE.get(number, name)
    if number == 0 or holder != name:
        raise ValueError(
            f"Expected a name with a wire number of its own, got {name!r} with {number}, which is "
            f"{'reserved' if number == 0 else repr(holder)}. Do: choose another name."
        )
    _COMPRESSORS[name] = compressor
    _NAMES_BY_CODE[number] = name
    return compressor


def unregister(name: str) -> None:
    """Forget a compressor, so that its name and number are free again."""
    _NAMES_BY_CODE.pop(code(name))
    del _COMPRESSORS[name]


def make(name: str, **options: Any) -> Compressor:
    """Return a compressor.

    Args:
        name: its name, with options or without: ``"topk"``, ``"topk:ratio=0.01"``, ``"topk:ratio=0.01:warmup=8"``.
        options: more options, by name.

    Raises:
        UnknownNameError: no such compressor, or it has no such option; the message lists the known ones.
        OptionError: an option is out of range, has no value, or is given twice.
        OptionTypeError: an option has the wrong type.
    """
    if not isinstance(name, str):
        raise _no_compressor(name)
    plain, *texts = name.split(":")
    known = options_of(plain)
    given = [*(parse_option(text, name) for text in texts), *options.items()]
    for option, _ in given:
        if option not in known:
            raise UnknownNameError(f"option of {plain}", option, known)
    if len(dict(given)) < len(given):
        raise OptionError(f"An option of {plain} is given twice, in {name!r} or after it. Give it once.")
    return _lookup(plain)(**dict(given))


def compressor_of(method: object) -> Compressor:
    """The compressor that a user means, who may give one, or its name as `make` takes it.

    Raises:
        OptionTypeError: something else; the message says what to pass in its place.
        UnknownNameError, OptionError: see `make`.
    """
    if isinstance(method, Compressor):
        return method
    if isinstance(method, str):
        return make(method)
    raise _no_compressor(method)


def names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_COMPRESSORS)


def options_of(name: str) -> dict[str, Any]:
    """Default value of each option of a compressor."""
    return _defaults(_lookup(name))


def code(name: str) -> int:
    """The number of a compressor on the wire: 16 bits, never 0."""
    _lookup(name)
    return _hash(name)


def describe(name: str) -> Description:
    """Summary, options and algebra of a compressor."""
    compressor = _lookup(name)
    summary = (compressor.__doc__ or "").strip().split("\n")[0]
    return Description(name, summary, options_of(name), code(name), make(name))


def _no_compressor(found: Any) -> OptionTypeError:
    if callable(found) and isinstance(getattr(found, "name", None), str):  # a class, or an `Algorithm`
        advice = f"Make one: {found.name}()."
    else:
        named = str(found).removeprefix("torch.") if isinstance(found, (torch.dtype, list, tuple)) else ""
        close = nearest(named, names())
        advice = f"Pass {close!r}." if close else f'Pass "topk:ratio=0.01", for example. Names: {", ".join(names())}.'
    return OptionTypeError(f"This is neither a compressor nor the name of one: {found!r}. {advice}")


def _lookup(name: str) -> type[Compressor]:
    if name not in _COMPRESSORS:
        raise UnknownNameError("compressor", name, _COMPRESSORS)
    return _COMPRESSORS[name]


def _defaults(compressor: type[Compressor]) -> dict[str, Any]:
    """Default value of each option, from the signature of the constructor."""
    if compressor.__init__ is object.__init__:
        return {}
    parameters = list(inspect.signature(compressor).parameters.values())
    for parameter in parameters:
        if parameter.default is parameter.empty:
            raise TypeError(
                f"Expected a default for every option, got none for {parameter.name!r} (in "
                f"{compressor.__qualname__}). Do: give it one, so that the name alone makes a compressor."
            )
    return {parameter.name: parameter.default for parameter in parameters}


def _identity(compressor: type[Compressor]) -> str:
    return f"{compressor.__module__}.{compressor.__qualname__}"


def _hash(name: str) -> int:
    return int(google_crc32c.value(name.encode())) & 0xFFFF


# -- as text ---------------------------------------------------------------------------------------------------


def spec_of(compressor: Compressor) -> str:
    """A compressor as text: its name, and the options that are not the default, as ``threelc:sparsity=1.5``."""
    defaults = options_of(compressor.name) if compressor.name in names() else {}
    changed = {key: value for key, value in sorted(compressor.options.items()) if defaults.get(key) != value}
    return ":".join([compressor.name, *(f"{key}={value}" for key, value in changed.items())])


def parse_option(text: str, spec: str) -> tuple[str, Any]:
    """The name and the value of an option of a text, as ``sparsity=1.5``."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise OptionError(f"{text!r} (of {spec!r}) is not NAME=VALUE. Write an option as in threelc:sparsity=1.75.")
    try:
        return key, ast.literal_eval(value.title() if value in ("true", "false") else value)
    except (SyntaxError, ValueError):
        return key, value
