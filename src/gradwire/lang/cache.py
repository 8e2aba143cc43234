"""Cache of generated source on disk, and the modules loaded from it.

The name of a file contains a hash of its source and of everything it is built on. A file is therefore never out of
date, and several processes may write the same one. Files are stored in `GRADWIRE_CACHE_DIR`, else in the user's cache
folder, else, if that is not writable, in a temporary folder of the process.
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

from gradwire.core.files import write_whole
from gradwire.kernels.cpu.compile import fingerprint

_modules: dict[str, ModuleType] = {}


def load(name: str, source: str) -> ModuleType:
    """Load generated source as a module, from disk if it is there.

    Args:
        name: Name of the compressor and the backend, for the file name.
        source: Python source.
    """
    key = f"{name}_{_digest(source)}"
    if key not in _modules:
        path = folder() / f"{key}.py"
        if not path.exists():
            write_whole(path, source)
        spec = importlib.util.spec_from_file_location(f"gradwire_generated.{key}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # pickling and Numba look it up by name
        spec.loader.exec_module(module)
        _modules[key] = module
    return _modules[key]


@functools.cache
def folder(kind: str = "generated") -> Path:
    """Folder for generated source, or for another kind of files that can be made again."""
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
