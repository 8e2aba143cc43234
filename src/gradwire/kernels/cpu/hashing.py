"""Universal hashing of positions to slots. Contracts: `reference.hashing`."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.random import fill_group32
from gradwire.kernels.cpu.vector import array_at, u32
from gradwire.kernels.layout import RANDOM32_GROUP
from gradwire.kernels.reference.hashing import HASH_STREAM

_STREAM = np.uint32(HASH_STREAM)
_FILLED = np.uint32(0x80000000)
_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@kernel
def hash_slot(position, a, b, slots):
    """The slot of one position. All arguments are unsigned and below 2^32, but `a` and `b` are uint64."""
    # Numba's products of uint32 are uint64. Cut back to 32 bits, LLVM computes them in vectors.
    x = np.uint32(position)
    x = np.uint32((x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B))
    x = np.uint32((x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35))
    x = x ^ x >> np.uint32(16)
    return ((np.uint64(x) * a + b) >> _HALF) * (np.uint64(slots) & _WORD) >> _HALF


@kernel
def keep_hashed(index, value, count, largest, slots, places, keys):
    """Keep the largest magnitude of the pairs that share a slot, the first of equal ones; return how many are kept.

    Args:
        index, value: Pairs in ascending order of index. The first `count` are valid. Kept pairs move to the front.
        largest: Scratch memory, uint32, one per slot.
        slots: Number of slots.
        places: Scratch memory, uint32, one per pair.
        keys: Words of the shared key and of the private key.
    """
    words = np.empty(RANDOM32_GROUP, np.uint32)
    fill_group32(keys[2], np.uint32(keys[3] ^ _STREAM), np.int64(0), words, np.int64(0))
    a = np.uint64(words[0]) | np.uint64(words[1]) << _HALF
    b = np.uint64(words[2]) | np.uint64(words[3]) << _HALF
    if slots == 0:
        return 0
    bits = array_at(np.uint64(value.ctypes.data), count, u32)  # magnitudes of finite floats order like their bits
    for j in range(count):
        places[j] = hash_slot(index[j], a, b, slots)
    largest[:slots] = 0
    filled = 0
    for j in range(count):
        before = largest[places[j]]
        largest[places[j]] = max(before, bits[j] | _FILLED)
        filled += before == 0
    for j in range(count):
        places[j] = largest[places[j]] == bits[j] | _FILLED
    kept = keep_marked(index, value, count, places)
    if kept > filled:  # equal magnitudes share a slot
        for j in range(kept):
            places[j] = hash_slot(index[j], a, b, slots)
        for j in range(kept):
            before = largest[places[j]]
            largest[places[j]] = 0
            places[j] = before != 0
        kept = keep_marked(index, value, kept, places)
    return kept


@kernel
def keep_marked(index, value, count, marks):
    """Keep the pairs whose mark is 1, not 0; return how many.

    A loop of its own: together with random reads of a table, it took nine times as long, because a processor cannot
    read ahead of writes to addresses that it does not know yet.
    """
    kept = 0
    for j in range(count):
        index[kept], value[kept] = index[j], value[j]
        kept += marks[j]
    return kept
