"""Memory of large arrays that live for a part of a step: bodies of messages, sums of gradients.

`empty` is `np.empty`, except that large arrays get blocks of a pool. A block returns to the pool when the last view of
its array is gone, and the next array of about its size gets it.

malloc serves these arrays badly, because one thread allocates them and another one frees them. It keeps freed memory in
arenas, one for each thread, or returns it to the system and clears every page of the next array again.

Fresh pages are expensive: to touch 4 KiB for the first time takes several times as long as to copy them. So blocks that
hold huge pages ask for them, and the block that was used last is kept, whatever its size.

Guarantees: a block is no other array's as long as its array, a view of it, or an exported buffer exists. Blocks without
an array take at most `KEPT_BYTES`, or there is only one. Any thread may call `empty`, and any thread may drop the last
view.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

MIN_BYTES = 1 << 17
"""Smaller arrays are malloc's: it reuses them well."""

KEPT_BYTES = 1 << 25
_GRAIN_BYTES = 1 << 16
_HUGE_BYTES = 1 << 22  # of a block with at least one huge page, wherever it begins
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

# Blocks without an array, oldest first. There is no lock, because garbage collection may call `_put_back` anywhere.
_free: deque[mmap.mmap] = deque()


def empty(size: int, dtype: npt.DTypeLike = np.uint8) -> np.ndarray:
    """Return a 1-D array of `size` elements with arbitrary contents.

    Raises:
        MemoryError: The system has no memory of this size.
    """
    kind = np.dtype(dtype)
    num_bytes = size * kind.itemsize
    if num_bytes < MIN_BYTES:
        return np.empty(size, kind)
    block = _take(num_bytes)
    array = np.frombuffer(block, kind, size)
    weakref.finalize(array, _put_back, block).atexit = False
    return array


def free_bytes() -> int:
    """Return the size of the blocks that no array uses."""
    return sum(map(len, list(_free)))


def _take(num_bytes: int) -> mmap.mmap:
    """Return the free block that was used last among those that fit, or a new one."""
    size = -(-num_bytes // _GRAIN_BYTES) * _GRAIN_BYTES
    for block in reversed(list(_free)):
        if size <= len(block) <= size + size // 4:
            try:
                _free.remove(block)
            except ValueError:  # another thread has it
                continue
            return block
    try:
        block = mmap.mmap(-1, size, flags=_FLAGS)
    except OSError as error:
        raise MemoryError(f"The system has no {size} bytes of memory.") from error
    if size >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _put_back(block: mmap.mmap) -> None:
    _free.append(block)
    while len(_free) > 1 and free_bytes() > KEPT_BYTES:
        try:
            _free.popleft()
        except IndexError:  # another thread was faster
            return
