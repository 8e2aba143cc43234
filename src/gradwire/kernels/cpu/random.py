"""Counter-based random numbers. Contracts: `reference.random`.

Each 32-bit word is kept in a 64-bit lane: the product of two words is then one instruction, and the upper half needs
no clearing, because the next round reads only the lower half.
"""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.lanes import convert, splat
from gradwire.kernels.cpu.vector import load, store, store_inside, u16, u32
from gradwire.kernels.layout import RANDOM16_GROUP, RANDOM32_GROUP, RANDOM_COUNTERS

LANES = 16  # 32 do not fit into registers: 32-bit values took 1.3 times as long
_LANE_NUMBERS = np.arange(LANES, dtype=np.uint64)
_LOW = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_ROUNDS = 7


def key_words(key: int) -> tuple[np.uint32, np.uint32]:
    """The two words of a 64-bit key."""
    return np.uint32(key & _LOW), np.uint32((key >> 32) & _LOW)


@kernel
def _words(key_0, key_1, counters):
    """The four words of each 64-bit counter."""
    c0, c1 = counters, counters >> 32
    c2 = c3 = splat(np.uint64(0), LANES)
    for _ in range(_ROUNDS):
        product_0, product_1 = (c0 & _LOW) * _MULTIPLIER_0, (c2 & _LOW) * _MULTIPLIER_1
        c0, c2 = (product_1 >> 32) ^ c1 ^ key_0, (product_0 >> 32) ^ c3 ^ key_1
        c1, c3 = product_1, product_0
        key_0, key_1 = np.uint32(key_0 + _WEYL_0), np.uint32(key_1 + _WEYL_1)
    return convert(c0, u32), convert(c1, u32), convert(c2, u32), convert(c3, u32)


@kernel
def _counters(first):
    return load(_LANE_NUMBERS, 0, LANES) + first


@kernel
def _store_halves(words, out, at):
    store_inside(out, at, convert(words, u16))
    store_inside(out, at + RANDOM_COUNTERS, convert(words >> 16, u16))


@kernel
def fill_group16(key_0, key_1, group, out, at):
    """Write the 1024 values of one group to out[at : at + 1024]."""
    for v in range(0, RANDOM_COUNTERS, LANES):
        counters = _counters(np.uint64(group) * np.uint64(RANDOM_COUNTERS) + np.uint64(v))
        w0, w1, w2, w3 = _words(key_0, key_1, counters)
        _store_halves(w0, out, at + v)
        _store_halves(w1, out, at + v + 2 * RANDOM_COUNTERS)
        _store_halves(w2, out, at + v + 4 * RANDOM_COUNTERS)
        _store_halves(w3, out, at + v + 6 * RANDOM_COUNTERS)


@kernel
def fill_group32(key_0, key_1, group, out, at):
    """Write the 512 values of one group to out[at : at + 512]."""
    for v in range(0, RANDOM_COUNTERS, LANES):
        counters = _counters(np.uint64(group) * np.uint64(RANDOM_COUNTERS) + np.uint64(v))
        w0, w1, w2, w3 = _words(key_0, key_1, counters)
        store_inside(out, at + v, w0)
        store_inside(out, at + v + RANDOM_COUNTERS, w1)
        store_inside(out, at + v + 2 * RANDOM_COUNTERS, w2)
        store_inside(out, at + v + 3 * RANDOM_COUNTERS, w3)


@kernel
def _copy_part(source, offset, out, at, count):
    """Copy `count` elements: an assignment of slices takes a second to compile, for the text of its errors."""
    for j in range(count):
        out[at + j] = source[offset + j]


@kernel
def fill16(key_0, key_1, first, count, scratch, out):
    """Write the values of global elements `first` to `first` + `count` to `out`; `scratch` holds one group."""
    i = np.int64(0)
    while i < count:
        group, offset = (first + i) // RANDOM16_GROUP, (first + i) % RANDOM16_GROUP
        length = min(RANDOM16_GROUP - offset, count - i)
        if length == RANDOM16_GROUP:
            fill_group16(key_0, key_1, group, out, i)
        else:
            fill_group16(key_0, key_1, group, scratch, np.int64(0))
            _copy_part(scratch, offset, out, i, length)
        i += length


@kernel
def _fill32(key_0, key_1, first, count, scratch, out):
    i = np.int64(0)
    while i < count:
        group, offset = (first + i) // RANDOM32_GROUP, (first + i) % RANDOM32_GROUP
        length = min(RANDOM32_GROUP - offset, count - i)
        if length == RANDOM32_GROUP:
            fill_group32(key_0, key_1, group, out, i)
        else:
            fill_group32(key_0, key_1, group, scratch, np.int64(0))
            _copy_part(scratch, offset, out, i, length)
        i += length


def random16(key: int, first: int, out: np.ndarray) -> None:
    fill16(*key_words(key), first, out.size, np.empty(RANDOM16_GROUP, np.uint16), out)


def random32(key: int, first: int, out: np.ndarray) -> None:
    _fill32(*key_words(key), first, out.size, np.empty(RANDOM32_GROUP, np.uint32), out)


@kernel
def _philox(key_0, key_1, counter_first, scratch, out):
    for i in range(0, out.size // 4, LANES):
        words = _words(key_0, key_1, _counters(counter_first + np.uint64(i)))
        for w in range(4):
            store(scratch, w * LANES, words[w])
        for j in range(min(LANES, out.size // 4 - i)):
            for w in range(4):
                out[4 * (i + j) + w] = scratch[w * LANES + j]


def philox(key: int, counter_first: int, out: np.ndarray) -> None:
    if out.size % 4:
        raise ValueError(f"Expected out of a multiple of 4 elements, got {out.size} (in philox).")
    _philox(*key_words(key), np.uint64(counter_first), np.empty(4 * LANES, np.uint32), out)
