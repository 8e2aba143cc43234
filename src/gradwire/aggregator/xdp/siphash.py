"""SipHash-2-4: a tag of 8 bytes with a key of 16, for packets that a program in the kernel verifies.

Source: Aumasson and Bernstein 2012, with their numbers of rounds. `guard.py` has the same function as a BPF program.
"""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import inlined, kernel

TAG_BYTES = 8
KEY_BYTES = 16
WORDS = 0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573
"""The constants with which the state begins: "somepseudorandomlygeneratedbytes"."""
LAST = 0xFF
ROUNDS, LAST_ROUNDS = 2, 4


@kernel
def siphash(data: np.ndarray, key: np.ndarray) -> np.uint64:
    """Return the tag of uint8[n] by a key, uint64[2]."""
    v0, v1 = key[0] ^ np.uint64(WORDS[0]), key[1] ^ np.uint64(WORDS[1])
    v2, v3 = key[0] ^ np.uint64(WORDS[2]), key[1] ^ np.uint64(WORDS[3])
    whole = data.size // 8
    words = data[: 8 * whole].view(np.uint64)
    for place in range(whole + 1):
        word = np.uint64(data.size & 0xFF) << np.uint64(56)
        if place < whole:
            word = words[place]
        else:
            for rest in range(8 * whole, data.size):
                word |= np.uint64(data[rest]) << np.uint64(8 * (rest - 8 * whole))
        v3 ^= word
        for _ in range(ROUNDS):
            v0, v1, v2, v3 = _mix(v0, v1, v2, v3)
        v0 ^= word
    v2 ^= np.uint64(LAST)
    for _ in range(LAST_ROUNDS):
        v0, v1, v2, v3 = _mix(v0, v1, v2, v3)
    tag: np.uint64 = v0 ^ v1 ^ v2 ^ v3
    return tag


@inlined
def _mix(v0, v1, v2, v3):
    v0 += v1
    v1 = _turn(v1, 13) ^ v0
    v0 = _turn(v0, 32)
    v2 += v3
    v3 = _turn(v3, 16) ^ v2
    v0 += v3
    v3 = _turn(v3, 21) ^ v0
    v2 += v1
    v1 = _turn(v1, 17) ^ v2
    return v0, v1, _turn(v2, 32), v3


@inlined
def _turn(value, bits):
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))
