"""How kernels are compiled: at first use, without the GIL, cached on disk.

The disk cache is Numba's, with three corrections. Ranks of a job compile at the same time: Numba reads the index, adds
a line and writes it back, and two processes that do so together can leave an index that names the wrong machine code.
A lock prevents this. Numba writes the index before the machine code, and uses the file names of older sources again: a
process that reads or dies in between would leave code of older sources, or of another signature. Files of older
sources are therefore removed first. And since helpers are inlined, a change in any module of kernels recompiles all.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

_LOCK_FILE = "gradwire.lock"


def kernel(function: Any) -> Any:
    """Compile at first use, without the GIL, and cache the result on disk.

    No fast-math: kernels must see non-finite values, and a fused multiply-add would round once where the other backends
    round twice.
    """
    return _compiled(function)


def inlined(function: Any) -> Any:
    """A kernel that LLVM always inlines: for functions of arrays that are called in a loop."""
    return _compiled(function, forceinline=True)


def _compiled(function: Any, **flags: Any) -> Any:
    dispatcher: Any = njit(nogil=True, error_model="numpy", **flags)(function)
    # Without a writable folder each process compiles.
    with contextlib.suppress(RuntimeError):
        dispatcher._cache = _KernelCache(function)
    return dispatcher


@functools.cache
def fingerprint() -> str:
    """Hash of the sources of all kernels."""
    folder = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _KernelCache(FunctionCache):
    def __init__(self, function: Any) -> None:
        super().__init__(function)
        stamp = (self._impl.locator.get_source_stamp(), fingerprint())
        self._cache_file = IndexDataCacheFile(
            cache_path=self.cache_path, filename_base=self._impl.filename_base, source_stamp=stamp
        )

    def save_overload(self, sig: Any, data: Any) -> None:
        folder = Path(self.cache_path)
        with _locked(folder):
            if not self._cache_file._load_index():  # it is of older sources
                for path in folder.glob(glob.escape(self._impl.filename_base) + ".*.nbc"):
                    path.unlink(missing_ok=True)
            super().save_overload(sig, data)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    try:
        handle = os.open(folder / _LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o666)
    except OSError:  # then nothing can be saved there anyway
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
