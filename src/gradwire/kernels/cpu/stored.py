"""Chunks in a payload: unpacked ones, entries of the chunk table, and threads. Inner loops of `floats` and `fixed`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.parallel import run_all, shares

LEAST_CHUNKS = 16  # per thread: a megabyte of float32, which takes longer than waking the thread


@kernel
def put_word(out, at, word):
    """Write an entry of the chunk table to out[at:]."""
    for byte in range(4):
        out[at + byte] = np.uint8((word >> (8 * byte)) & 0xFF)


@kernel
def store_chunk(chunk, out, at):
    """Write the elements unchanged."""
    size = chunk.itemsize
    for i in range(chunk.size):
        value = np.uint32(chunk[i])
        for byte in range(size):
            out[at + i * size + byte] = np.uint8((value >> np.uint32(8 * byte)) & np.uint32(0xFF))


@kernel
def load_chunk(body, at, chunk):
    """Read elements that were stored unchanged."""
    size = chunk.itemsize
    for i in range(chunk.size):
        value = np.uint32(0)
        for byte in range(size):
            value |= np.uint32(body[at + i * size + byte]) << np.uint32(8 * byte)
        chunk[i] = value


def pack_in_parts(
    pack: Callable[[range, int, int], int], chunks: int, chunk_bytes: int, start: int, most: int, out: np.ndarray
) -> int:
    """Pack chunks into out[start:most] on several threads; return where they end, or -1 if they do not fit.

    Args:
        pack: Packs a range of chunks into out[at:most] and returns where they end, or -1 if they do not fit.
        chunks: Number of chunks.
        chunk_bytes: Most bytes of a chunk.
        start: Where the first chunk begins.
        most: Where the last must have ended.
        out: Bytes to write.
    """
    parts = shares(chunks, LEAST_CHUNKS)
    if len(parts) > 1:
        # Each part starts where it would if all before it were stored unpacked. Then the parts move together.
        places = [start + part.start * chunk_bytes for part in parts] + [most]
        ends = run_all([partial(pack, *each) for each in zip(parts, places[:-1], places[1:], strict=True)])
        if min(ends) >= 0:
            return _move_up(out, places, ends)
    end = pack(range(chunks), start, most)
    return end if end <= most else -1


def _move_up(out: np.ndarray, places: list[int], ends: list[int]) -> int:
    """Move the ranges of `out` from each place to each end together; return where they end."""
    at = ends[0]
    for place, end in zip(places[1:], ends[1:], strict=False):
        out[at : at + end - place] = out[place:end]
        at += end - place
    return at
