"""Universal hashing of positions to slots, with a hash function drawn from a key.

h(i) = (((a · mix(i) + b) mod 2^64) >> 32) · slots >> 32, with random 64-bit numbers a and b. Two positions share a slot
with probability 1 / slots, to one in 2^32 / slots. `mix` is a fixed bijection of 32-bit numbers. It keeps that property
and makes equidistant positions, which multiplication alone would spread evenly, collide like any others.

Source: Carter and Wegman 1979 (universal hashing); Dietzfelbinger 1996 (multiply-shift); Appleby 2011 (the bijection,
MurmurHash3's finalizer).
"""
# Shapes: K = positions

from __future__ import annotations

import numpy as np

from gradwire.kernels.reference.random import random32

HASH_STREAM = 0x632BE5AB  # makes the key of these draws different from those of other streams
MIX_SHIFTS, MIX_FACTORS = (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35)
_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def hash_numbers(key: int) -> tuple[int, int]:
    """The random numbers a and b for a key."""
    words = np.empty(4, np.uint32)
    random32(key ^ (HASH_STREAM << 32), 0, words)
    low_a, high_a, low_b, high_b = words.tolist()
    return low_a | high_a << 32, low_b | high_b << 32


def hash_slots(index: np.ndarray, a: int, b: int, slots: int) -> np.ndarray:
    """The slot, from 0 to `slots` - 1, of each position, int64[K].

    Args:
        index: Positions below 2^32.
        a, b: Result of `hash_numbers`.
        slots: Number of slots, at least 1, below 2^32.
    """
    x = np.asarray(index, np.uint64) & _WORD
    for shift, factor in zip(MIX_SHIFTS, (*MIX_FACTORS, 1)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor) & _WORD
    chosen: np.ndarray = ((x * np.uint64(a) + np.uint64(b)) >> _HALF) * np.uint64(slots) >> _HALF
    return chosen.astype(np.int64)
