"""Small integers packed into bytes. Contracts: `reference.bits`."""
# Shapes: N elements, S = ceil(N * bits / 8) bytes

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import LANES, as_writable
from gradwire.kernels.cpu.vector import load, store, store_until
from gradwire.kernels.layout import ceil_div, expect_bits, expect_size


@kernel
def _pack_bits(q, bits, out):
    per, size = 8 // bits, out.size
    mask = (1 << bits) - 1
    for i in range(0, size, LANES):
        packed = load(q, i, LANES) & mask
        for plane in range(1, per):
            packed = packed | ((load(q, plane * size + i, LANES) & mask) << (plane * bits))
        store(out, i, packed)


def pack_bits(q: np.ndarray, bits: int, out: np.ndarray) -> None:
    per = expect_bits("pack_bits", bits)
    expect_size("pack_bits", "out", out, ceil_div(q.size, per))
    _pack_bits(as_writable(q), bits, out)


@kernel
def _unpack_bits(packed, bits, out):
    per, size = 8 // bits, packed.size
    mask = (1 << bits) - 1
    for i in range(0, size, LANES):
        bytes_ = load(packed, i, LANES)
        for plane in range(per):
            # Not past the plane: the first elements of the next one are already written.
            store_until(out, plane * size + i, (plane + 1) * size, (bytes_ >> (plane * bits)) & mask)


def unpack_bits(packed: np.ndarray, bits: int, out: np.ndarray) -> None:
    per = expect_bits("unpack_bits", bits)
    expect_size("unpack_bits", "packed", packed, ceil_div(out.size, per))
    _unpack_bits(as_writable(packed), bits, out)
