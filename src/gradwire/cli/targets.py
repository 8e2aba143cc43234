"""Targets of commands: a compressor by name, or an object in a module or file of the user."""

from __future__ import annotations

from inspect import isabstract, isfunction
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradwire.bench.users import load_module, users_code
from gradwire.core.errors import GradwireError, OptionError, UnknownNameError

if TYPE_CHECKING:
    from gradwire.compressors.base import Compressor

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="Compressor (topk, topk:ratio=0.01), MODULE:NAME, path/to/file.py:NAME, or path/to/file.py for all in it.",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="KEY=VALUE", help="Option of the compressor. May be repeated."),
]


def codecs_of(target: str, options: list[str] | None) -> dict[str, Compressor]:
    """Make the compressors of a target with these options: one, or all that a file defines.

    Returns:
        The compressors, each by a target that names it alone.

    Raises:
        GradwireError: There is no such file, module or compressor, or an option does not fit.
        UserCodeError: The user's code raised.
    """
    from gradwire.compressors.base.registry import names, options_of, parse_option

    name = target.partition(":")[0]
    defaults = options_of(name) if name in names() else {}
    given = dict(parse_option(option, target, defaults) for option in options or [])
    if not target.endswith(".py"):
        return {target: _codec_of(target, given)}
    found = _compressors(load_module(target))
    if not found:
        raise GradwireError(
            f"{target} defines no compressor. Decorate an encoder with @gradwire.compressor and its decoder with "
            "@NAME.decode, or derive a class from gradwire.Compressor."
        )
    return {f"{target}:{name}": _made(f"{target}:{name}", each, given) for name, each in found.items()}


def object_of(target: str) -> Any:
    """Return the object named by MODULE:NAME or path/to/file.py:NAME.

    Raises:
        GradwireError: There is no such file, module or name.
        UserCodeError: The user's code raised.
    """
    place, _, name = target.rpartition(":")
    module = load_module(place)
    if not hasattr(module, name):
        public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        functions = [key for key, value in public.items() if isfunction(value) and _is_own(value, module)]
        raise UnknownNameError(f"function of {place}", name, functions)
    return getattr(module, name)


def _codec_of(target: str, given: dict[str, Any]) -> Compressor:
    from gradwire.compressors import make, names

    place, colon, name = target.rpartition(":")
    if not colon or "=" in name:
        return make(target, **given)
    module = load_module(place)
    known = _compressors(module)
    found = getattr(module, name, None)
    if found is None and name in names():
        return make(name, **given)
    if found is None or not _makes_compressors(found):
        raise UnknownNameError(f"compressor of {place}", name, known)
    return _made(target, found, given)


def _made(target: str, found: Any, given: dict[str, Any]) -> Compressor:
    """Make a compressor from an algorithm, a class or a compressor."""
    from gradwire.compressors.base import Compressor

    if isinstance(found, Compressor):
        if given:
            raise OptionError(
                f"{target} is {found!r}, with its options set. Leave --option out, or name its class or algorithm."
            )
        return found
    with users_code(f"Making {target}"):
        made: Compressor = found(**given)
        return made


def _compressors(module: ModuleType) -> dict[str, Any]:
    """Algorithms, classes and compressors that a module defines itself."""
    return {
        key: value
        for key, value in vars(module).items()
        if _makes_compressors(value) and (_is_own(value, module) or not callable(value))
    }


def _makes_compressors(value: object) -> bool:
    from gradwire.compressors.base import Compressor
    from gradwire.compressors.base.decorator import Algorithm

    if isinstance(value, type):
        return issubclass(value, Compressor) and not isabstract(value)
    return isinstance(value, (Algorithm, Compressor))


def _is_own(value: object, module: ModuleType) -> bool:
    """Whether a module defines a function, class or algorithm itself, and does not import it."""
    return callable(value) and getattr(value, "__module__", "") == module.__name__
