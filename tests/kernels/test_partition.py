"""Without AVX-512, elements move one by one: that code, run as plain Python, is compared with the compiled code."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.kernels.cpu import partition, streams
from gradwire.kernels.cpu.chunk_counts import symbols_of
from gradwire.kernels.float_format import FORMATS, LEVELS

SIZES = [0, 1, 15, 16, 17, 200]


def chunk(size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    bits = rng.standard_normal(size).astype(np.float32).view(np.uint32)
    bits &= ~((np.uint32(1) << (6 * rng.integers(0, LEVELS, size)).astype(np.uint32)) - np.uint32(1))
    bits[rng.random(size) < 0.3] = 0
    return bits


@pytest.fixture(params=[False, True], ids=["one by one", "as compiled"])
def run(request, monkeypatch):
    """Call a kernel compiled, or as plain Python without vectors."""
    if request.param:
        return lambda kernel, *args: kernel(*args)
    monkeypatch.setattr(partition, "_BY_VECTORS", False)
    return lambda kernel, *args: kernel.py_func(*args)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_kept_is_in_order_and_comes_back(run, size):
    x, form = chunk(size), tuple(FORMATS[np.dtype(np.float32)])
    count = int((x != 0).sum())
    kept = np.zeros(partition.PITCH, np.uint32)
    run(partition.keep, x, form, kept)
    expected = (x >> 31 << 23 | x & 0x7FFFFF)[x != 0]
    assert (kept[:count] == expected).all()

    by_level, levels = np.zeros(LEVELS * partition.PITCH, np.uint32), np.zeros(partition.PITCH, np.uint8)
    run(partition.keep_by_level, x, form, by_level, levels)
    gathered = np.zeros(partition.PITCH, np.uint32)
    assert run(partition.gather_levels, levels[:count], 6, by_level, gathered[:count])
    assert (gathered[:count] == expected).all()

    symbols, is_kept = (np.zeros(streams.STRIDE, np.uint8) for _ in range(2))
    is_kept[:size] = x != 0
    wide = np.zeros(max(size, 64), np.uint16)
    symbols_of(x, form, 128, wide, np.zeros(LEVELS + 1, np.int64))
    symbols[:size] = wide[:size]
    kept[count] = 0
    out = np.zeros(size, np.uint32)
    assert run(partition.spread, symbols, is_kept, 0, 0, kept, form, 0, out) == count
    assert (out == x).all()


def test_what_has_another_level_or_is_zero_after_all_is_told(run):
    by_level, levels = np.zeros(LEVELS * partition.PITCH, np.uint32), np.zeros(20, np.uint8)
    by_level[:20] = 1
    by_level[7] = 64
    assert not run(partition.gather_levels, levels, 6, by_level, np.zeros(20, np.uint32))
    form, symbols = tuple(FORMATS[np.dtype(np.float32)]), np.zeros(streams.STRIDE, np.uint8)
    is_kept, kept = np.ones(streams.STRIDE, np.uint8), np.ones(partition.PITCH, np.uint32)
    kept[18] = 0
    out = np.zeros(20, np.uint32)
    assert run(partition.spread, symbols, is_kept, 0, 0, kept, form, 0, out) == -1
