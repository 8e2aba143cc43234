"""Counter-based random numbers: element e of a stream depends only on the key and on e.

A range of a tensor therefore draws the same numbers as the whole tensor, in any order and on any backend. Each counter
is one call of Philox4x32-7 with counter words (low, high, 0, 0) and key words (low, high). It yields four 32-bit words.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". Differences: 7 rounds, which pass all the
authors' tests, instead of their 10, which would slow down stochastic rounding by a quarter; our own mapping from
elements to words, in which neighboring elements are neighboring vector lanes.
"""

from __future__ import annotations

import numpy as np

from gradwire.kernels.layout import RANDOM16_GROUP, RANDOM32_GROUP, RANDOM_COUNTERS

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox_words(counter: tuple[np.ndarray, ...], key: int, rounds: int = _ROUNDS) -> tuple[np.ndarray, ...]:
    """The four output words of four counter words. All are uint64 arrays of values below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    for _ in range(rounds):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (product1 >> _SHIFT) ^ c1 ^ np.uint64(k0), (product0 >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c1, c3 = product1 & _MASK, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _words(key: int, counters: np.ndarray) -> tuple[np.ndarray, ...]:
    zero = np.zeros_like(counters)
    return philox_words((counters & _MASK, counters >> _SHIFT, zero, zero), key)


def _elements(first: int, size: int) -> np.ndarray:
    return np.uint64(first) + np.arange(size, dtype=np.uint64)


def _words_of_groups(key: int, first: int, size: int, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The words of the counter of each element, uint64[4, size], and s, int64[size]."""
    e = _elements(first, size)
    group, o = e // np.uint64(group_size), e % np.uint64(group_size)
    s, v = (o // np.uint64(RANDOM_COUNTERS)).astype(np.int64), o % np.uint64(RANDOM_COUNTERS)
    return np.stack(_words(key, group * np.uint64(RANDOM_COUNTERS) + v)), s


def philox(key: int, counter_first: int, out: np.ndarray) -> None:
    """Write the words of consecutive counters to `out`, uint32[4 n]; word w of counter c is out[4 c + w]."""
    if out.size % 4:
        raise ValueError(f"Expected out of a multiple of 4 elements, got {out.size} (in philox).")
    out[:] = np.stack(_words(key, _elements(counter_first, out.size // 4)), axis=1).reshape(-1)


def random16(key: int, first: int, out: np.ndarray) -> None:
    """Write the 16-bit values of global elements first, first + 1, ... to `out`, uint16[N].

    Element e is in group g = e // 1024, at offset o = e % 1024. With s = o // 128 and v = o % 128, its value is half
    s % 2 (0 is the lower) of word s // 2 of counter 128 g + v.
    """
    words, s = _words_of_groups(key, first, out.size, RANDOM16_GROUP)
    chosen = words[s // 2, np.arange(out.size)]
    out[:] = (chosen >> (np.uint64(16) * (s % 2).astype(np.uint64))) & np.uint64(0xFFFF)


def random32(key: int, first: int, out: np.ndarray) -> None:
    """Write the 32-bit values of global elements first, first + 1, ... to `out`, uint32[N].

    Element e is in group g = e // 512. With s = e % 512 // 128 and v = e % 128, its value is word s of counter
    128 g + v.
    """
    words, s = _words_of_groups(key, first, out.size, RANDOM32_GROUP)
    out[:] = words[s, np.arange(out.size)]
