"""Generated source on disk, by content, and the modules that are loaded from it.

A file is named by a hash of its source and of all that it is built on, so it is never out of date and processes that
write the same one at once do no harm. It lies in `GRADWIRE_CACHE_DIR`, else in the user's cache folder, else, where
nothing can be written there, in a folder of the process's own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from gradwire.kernels.cpu.compile import fingerprint

_modules: dict[str, ModuleType] = {}


def load(name: str, source: str) -> ModuleType:
    """The module of generated source; from disk where it has been there before.

    Args:
        name: of the compressor and the backend, for the file's name.
        source: Python source.
    """
    key = f"{name}_{_digest(source)}"
    if key not in _modules:
        path = folder() / f"{key}.py"
        if not path.exists():
            _write(path, source)
        spec = importlib.util.spec_from_file_location(f"gradwire_generated.{key}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # pickling and Numba look it up by name
        spec.loader.exec_module(module)
        _modules[key] = module
    return _modules[key]


@functools.cache
def folder(kind: str = "generated") -> Path:
    """Where generated source lies, or another kind of thing that can be made again."""
    wanted = os.environ.get("GRADWIRE_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "gradwire"
    )
    path = Path(wanted) / kind
    with contextlib.suppress(OSError):
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    return Path(tempfile.mkdtemp(prefix="gradwire-"))


def _digest(source: str) -> str:
    runtime = (Path(__file__).parent / "targets" / "numba" / "runtime.py").read_bytes()
    digest = hashlib.blake2b(source.encode() + runtime + fingerprint().encode(), digest_size=8)
    return digest.hexdigest()


def _write(path: Path, source: str) -> None:
    """Write as a whole: another process sees no half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    with os.fdopen(handle, "w") as file:
        file.write(source)
    os.replace(temporary, path)
