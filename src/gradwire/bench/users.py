"""User code that a tool runs: modules, files, functions. Its errors are shown without gradwire's own frames."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import gradwire
from gradwire.core.errors import GradwireError

_NOT_USERS = ("<frozen importlib", *(f"{Path(path).parent}/" for path in (importlib.__file__, gradwire.__file__)))


class UserCodeError(GradwireError):
    """User code raised an error. The message has its traceback from the user's first line."""


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Turn errors in the ``with`` block into `UserCodeError`, except those of gradwire itself.

    Args:
        what: The action, as the subject of a sentence.

    Raises:
        UserCodeError: The block raised an error.
    """
    try:
        yield
    except GradwireError:
        raise
    except Exception as error:
        raise UserCodeError(f"{what} failed.\n{_shown(error)}") from error


def load_module(place: str) -> ModuleType:
    """Import a module by name, also from the working folder, or from a path that ends in ``.py``.

    Raises:
        GradwireError: There is no such module or file.
        UserCodeError: The module raised an error.
    """
    if place.endswith(".py"):
        return _load_file(place)
    sys.path.insert(0, str(Path.cwd()))
    with users_code(f"Importing {place}"):
        try:
            return importlib.import_module(place)
        except (ModuleNotFoundError, ValueError, TypeError) as error:  # the last two: not a valid module name
            missing = getattr(error, "name", None) or place
            if f"{place}.".startswith(f"{missing}.") and not _frames(error):
                raise GradwireError(
                    f"There is no module {place!r}. Run the command in its folder, or give its file: "
                    "path/to/file.py:NAME."
                ) from None
            raise


def _load_file(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise GradwireError(f"There is no file {place!r}. Give a file as path/to/file.py:NAME.")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        with users_code(f"Importing {place}"):
            spec.loader.exec_module(module)
    except GradwireError:
        del sys.modules[path.stem]  # a second import must raise the same error
        raise
    return module


def _shown(error: BaseException) -> str:
    """The traceback without frames of gradwire and of the import system."""
    found = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = found
    while part is not None:
        part.stack = traceback.StackSummary.from_list(_users(part.stack))
        part = part.__cause__ or part.__context__
    text = "".join(found.format())
    return text.replace("Traceback (most recent call last):\n", "").rstrip()


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return _users(traceback.extract_tb(error.__traceback__))


def _users(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return [frame for frame in frames if not frame.filename.startswith(_NOT_USERS)]
