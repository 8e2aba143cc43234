"""What commands are pointed at: a compressor by name, or something in a module or a file of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradwire.core.errors import GradwireError, UnknownNameError

if TYPE_CHECKING:
    from gradwire.compressors.base import Compressor

Target = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="A name (topk, or topk:ratio=0.01), MODULE:NAME, or path/to/file.py:NAME."),
]
Options = Annotated[
    list[str] | None, typer.Option("--option", "-o", metavar="KEY=VALUE", help="An option of the compressor.")
]


def codec_of(target: str, options: list[str] | None) -> Compressor:
    """The compressor that a target names, with these options.

    Raises:
        GradwireError: there is no such file, module or compressor, or an option does not fit.
    """
    from gradwire.compressors import make, names
    from gradwire.compressors.base import Compressor
    from gradwire.compressors.base.decorator import Algorithm
    from gradwire.compressors.base.registry import parse_option

    given = dict(parse_option(option, target) for option in options or [])
    place, colon, name = target.rpartition(":")
    if not colon or "=" in name:
        return make(target, **given)
    module = _module(place)
    found = getattr(module, name, None)
    if isinstance(found, Algorithm) or (isinstance(found, type) and issubclass(found, Compressor)):
        made: Compressor = found(**given)
        return made
    if isinstance(found, Compressor) and not given:
        return found
    if found is None and name in names():
        return make(name, **given)
    raise UnknownNameError(f"compressor of {place}", name, _compressors(module))


def object_of(target: str) -> Any:
    """What MODULE:NAME or path/to/file.py:NAME names.

    Raises:
        GradwireError: there is no such file, module or name.
    """
    place, _, name = target.rpartition(":")
    module = _module(place)
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnknownNameError(f"function of {place}", name, functions)
    return getattr(module, name)


def _compressors(module: ModuleType) -> list[str]:
    from gradwire.compressors.base import Compressor
    from gradwire.compressors.base.decorator import Algorithm

    return [key for key, value in vars(module).items() if isinstance(value, (Algorithm, Compressor))]


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        if importlib.util.find_spec(place.partition(".")[0]) is None:
            raise GradwireError(
                f"Expected a module that can be imported, got {place!r}. Do: run where it lies, or name its file, "
                "path/to/file.py:NAME."
            )
        return importlib.import_module(place)
    path = Path(place).resolve()
    if not path.is_file():
        raise GradwireError(f"Expected a file, got {place!r}, which is none. Do: path/to/file.py:NAME.")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
