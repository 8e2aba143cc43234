"""Universal hashing of positions to slots. Contracts: `reference.hashing`."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import MAGNITUDE
from gradwire.kernels.cpu.random import fill_group32
from gradwire.kernels.cpu.vector import array_at, u32
from gradwire.kernels.layout import RANDOM32_GROUP
from gradwire.kernels.reference.hashing import HASH_STREAM

_STREAM = np.uint32(HASH_STREAM)
_MAGNITUDE, _TAKEN = np.uint32(MAGNITUDE), np.uint32(0xFFFFFFFF)
_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@kernel
def hash_slot(position, a, b, slots):
    """The slot of one position. All arguments are uint64."""
    x = (position ^ (position >> np.uint64(16))) * np.uint64(0x85EBCA6B) & _WORD
    x = (x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35) & _WORD
    x = x ^ (x >> np.uint64(16))
    return ((x * a + b) >> _HALF) * slots >> _HALF


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
        places[j] = hash_slot(np.uint64(index[j]), a, b, np.uint64(slots))
    largest[:slots] = 0
    for j in range(count):
        largest[places[j]] = max(largest[places[j]], bits[j] & _MAGNITUDE)
    kept = 0
    for j in range(count):
        stays = np.uint32(largest[places[j]] == bits[j] & _MAGNITUDE)
        largest[places[j]] |= _TAKEN * stays
        index[kept], value[kept] = index[j], value[j]
        kept += stays
    return kept
