"""Universal hashing of positions to slots. Mirrors `reference.hashing`, where the contracts stand."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.random import fill_group32
from gradwire.kernels.layout import RANDOM32_GROUP
from gradwire.kernels.reference.hashing import HASH_STREAM

_STREAM = np.uint32(HASH_STREAM)
_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@kernel
def hash_slot(position, a, b, slots):
    """The slot of one position; all are uint64."""
    x = (position ^ (position >> np.uint64(16))) * np.uint64(0x85EBCA6B) & _WORD
    x = (x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35) & _WORD
    x = x ^ (x >> np.uint64(16))
    return ((x * a + b) >> _HALF) * slots >> _HALF


@kernel
def keep_hashed(index, value, count, table, keys):
    """Of the pairs that share a slot of the table keep the last, in their order; return how many are kept.

    Args:
        index, value: pairs, of which the first `count` count, ascending; the kept ones are moved to the front.
        table: uint32[slots], of any content.
        keys: words of the shared and of the private key.
    """
    words = np.empty(RANDOM32_GROUP, np.uint32)
    fill_group32(keys[2], np.uint32(keys[3] ^ _STREAM), np.int64(0), words, np.int64(0))
    a = np.uint64(words[0]) | np.uint64(words[1]) << _HALF
    b = np.uint64(words[2]) | np.uint64(words[3]) << _HALF
    slots = np.uint64(table.size)
    if slots == 0:
        return 0
    for j in range(count):
        table[hash_slot(np.uint64(index[j]), a, b, slots)] = j
    kept = 0
    for j in range(count):
        position = index[j]
        is_last = table[hash_slot(np.uint64(position), a, b, slots)] == j
        index[kept], value[kept] = position, value[j]
        kept += is_last
    return kept
