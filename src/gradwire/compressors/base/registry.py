"""The registry: compressors by name, options by name, and the number of a name on the wire.

The wire number is a hash of the name, so it does not depend on the order of registration, and a user's own compressor
has the same number on every rank. A name whose number is taken is refused at registration.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import google_crc32c
import torch

from gradwire.compressors.base.contract import Compressor
from gradwire.core.errors import OptionError, OptionTypeError, UnknownNameError, nearest

DENSE_NAME = "none"
"""Name of the compressor that sends elements as they are, with which all others are compared."""

_COMPRESSORS: dict[str, type[Compressor]] = {}
_NAMES_BY_CODE: dict[int, str] = {}

C = TypeVar("C", bound=type[Compressor])


@dataclass(frozen=True)
class Description:
    """Description of a compressor for users who choose one.

    Attributes:
        name: Name for `make`.
        summary: First line of its documentation.
        options: Default value of each option by name.
        code: Number on the wire.
        default: Instance with default options, which holds the declared properties.
    """

    name: str
    summary: str
    options: dict[str, Any]
    code: int
    default: Compressor


def register(compressor: C) -> C:
    """Register a compressor under its `name`. Use it as a decorator; it returns the class.

    A class replaces an older one of the same module and qualified name, so that a notebook cell can run twice.

    Raises:
        TypeError: The class is not a subclass of `Compressor`, or an option has no default.
        ValueError: The name is taken or is not a lower-case identifier, or its wire number is taken.
    """
    if not (isinstance(compressor, type) and issubclass(compressor, Compressor)):
        raise TypeError(f"{compressor!r} is not a subclass of gradwire.Compressor. Derive it from that class.")
    name = getattr(compressor, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(
            f"{name!r} is no name of a compressor (in {compressor.__qualname__}). Set `name` in the class to "
            "lower-case letters, digits and _."
        )
    _defaults(compressor)
    known = _COMPRESSORS.get(name)
    if known is not None and _identity(known) != _identity(compressor):
        raise ValueError(f"The name {name!r} is taken by {_identity(known)}. Choose another name.")
    number = _hash(name)
    holder = _NAMES_BY_CODE.get(number, name)
    if number == 0 or holder != name:
        raise ValueError(
            f"The wire number {number} of {name!r} is {'reserved' if number == 0 else f'that of {holder!r}'}. Choose "
            "another name."
        )
    _COMPRESSORS[name] = compressor
    _NAMES_BY_CODE[number] = name
    return compressor


def unregister(name: str) -> None:
    """Remove a compressor from the registry."""
    _NAMES_BY_CODE.pop(code(name))
    del _COMPRESSORS[name]


def make(name: str, **options: Any) -> Compressor:
    """Make a compressor.

    Args:
        name: Name, with or without options: ``"topk"``, ``"topk:ratio=0.01"``, ``"topk:ratio=0.01:warmup=8"``.
        options: More options by name.

    Raises:
        UnknownNameError: Unknown compressor or option; the message lists the known ones.
        OptionError: An option is out of range, has no value, or is given twice.
        OptionTypeError: An option has the wrong type.
    """
    if not isinstance(name, str):
        raise _no_compressor(name)
    plain, *texts = name.split(":")
    known = options_of(plain)
    given = [*(parse_option(text, name, known) for text in texts), *options.items()]
    for option, _ in given:
        if option not in known:
            raise UnknownNameError(f"option of {plain}", option, known)
    if len(dict(given)) < len(given):
        raise OptionError(f"An option of {plain} is given twice, in {name!r} or after it. Give it once.")
    return _lookup(plain)(**dict(given))


def compressor_of(method: object) -> Compressor:
    """Return a compressor given as such, or by a name as for `make`.

    Raises:
        OptionTypeError: The argument is neither; the message says what to pass.
        UnknownNameError, OptionError: See `make`.
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
    """Number of a compressor on the wire: 16 bits, never 0."""
    _lookup(name)
    return _hash(name)


def describe(name: str) -> Description:
    """Summary, options and declared properties of a compressor."""
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
                f"The option {parameter.name!r} of {compressor.__qualname__} has no default. Give it one, so that the "
                "name alone makes a compressor."
            )
    return {parameter.name: parameter.default for parameter in parameters}


def _identity(compressor: type[Compressor]) -> str:
    return f"{compressor.__module__}.{compressor.__qualname__}"


def _hash(name: str) -> int:
    return int(google_crc32c.value(name.encode())) & 0xFFFF


# -- as text ---------------------------------------------------------------------------------------------------


def spec_of(compressor: Compressor) -> str:
    """A compressor as text: its name, and options that differ from the default, as in ``threelc:sparsity=1.5``."""
    defaults = options_of(compressor.name) if compressor.name in names() else {}
    changed = {key: value for key, value in sorted(compressor.options.items()) if defaults.get(key) != value}
    return ":".join([compressor.name, *(f"{key}={value}" for key, value in changed.items())])


def parse_option(text: str, spec: str, defaults: Mapping[str, Any] | None = None) -> tuple[str, Any]:
    """Name and value of an option in a text such as ``sparsity=1.5``. If its default is a text, so is the value."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise OptionError(f"{text!r} (of {spec!r}) is not NAME=VALUE. Write an option as in threelc:sparsity=1.75.")
    try:
        found = ast.literal_eval(value.title() if value in ("true", "false") else value)
    except (SyntaxError, ValueError):
        return key, value
    is_text = isinstance((defaults or {}).get(key), str)
    return key, value if is_text and not isinstance(found, str) else found
