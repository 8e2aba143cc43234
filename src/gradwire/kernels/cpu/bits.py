"""Signs and small integers packed into bytes. Mirrors `reference.bits`, where the contracts stand."""
# Shapes: N elements, W ranks, S = ceil(N * bits / 8) bytes

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import LANES, addresses, as_input, as_writable, load_f32
from gradwire.kernels.cpu.lanes import (
    as_bytes,
    bits_mask,
    from_bytes,
    lanes_below,
    mask_bits,
    select,
    splat,
)
from gradwire.kernels.cpu.vector import array_at, load, store, store_until, u8
from gradwire.kernels.layout import ceil_div, expect_bits, expect_same_ranks, expect_size

_SIGN_BYTES = 8  # of LANES elements


@kernel
def _pack_signs(x, out):
    for i in range(0, x.size, LANES):
        low = mask_bits(load_f32(x, i, LANES) < 0)
        inside = mask_bits(lanes_below(x.size - i, LANES))
        store(out, i >> 3, as_bytes(inside & ~low))


def pack_signs(x: np.ndarray, out: np.ndarray) -> None:
    expect_size("pack_signs", "out", out, ceil_div(x.size, 8))
    _pack_signs(as_input(x), out)


@kernel
def _encode_signs(x, low, high, out, residual):
    lows, highs = splat(low, LANES), splat(high, LANES)
    for i in range(0, x.size, LANES):
        values = load_f32(x, i, LANES)
        is_low = values < 0
        inside = mask_bits(lanes_below(x.size - i, LANES))
        store(out, i >> 3, as_bytes(inside & ~mask_bits(is_low)))
        store(residual, i, values - select(is_low, lows, highs))


def encode_signs(x: np.ndarray, low: float, high: float, out: np.ndarray, residual: np.ndarray) -> None:
    expect_size("encode_signs", "residual", residual, x.size)
    expect_size("encode_signs", "out", out, ceil_div(x.size, 8))
    _encode_signs(as_input(x), np.float32(low), np.float32(high), out, residual)


@kernel
def _unpack_signs(packed, low, high, out):
    lows, highs = splat(low, LANES), splat(high, LANES)
    for i in range(0, out.size, LANES):
        is_high = bits_mask(from_bytes(load(packed, i >> 3, _SIGN_BYTES)))
        store(out, i, select(is_high, highs, lows))


@kernel
def _add_signs(packed, low, high, out):
    lows, highs = splat(low, LANES), splat(high, LANES)
    for i in range(0, out.size, LANES):
        is_high = bits_mask(from_bytes(load(packed, i >> 3, _SIGN_BYTES)))
        store(out, i, load(out, i, LANES) + select(is_high, highs, lows))


def unpack_signs(packed: np.ndarray, low: float, high: float, out: np.ndarray, accumulate: bool = False) -> None:
    expect_size("unpack_signs", "packed", packed, ceil_div(out.size, 8))
    run = _add_signs if accumulate else _unpack_signs
    run(as_writable(packed), np.float32(low), np.float32(high), out)


@kernel
def _unpack_signs_sum(packed, low, high, out):
    num_bytes = (out.size + 7) >> 3
    for i in range(0, out.size, LANES):
        total = splat(np.float32(0), LANES)
        for rank in range(packed.size):
            signs = array_at(packed[rank], num_bytes, u8)
            is_high = bits_mask(from_bytes(load(signs, i >> 3, _SIGN_BYTES)))
            total = total + select(is_high, splat(high[rank], LANES), splat(low[rank], LANES))
        store(out, i, total)


def unpack_signs_sum(packed: Sequence[np.ndarray], low: np.ndarray, high: np.ndarray, out: np.ndarray) -> None:
    expect_same_ranks("unpack_signs_sum", packed, low, high)
    for signs in packed:
        expect_size("unpack_signs_sum", "packed", signs, ceil_div(out.size, 8))
    _unpack_signs_sum(addresses(packed, np.uint8), as_writable(low), as_writable(high), out)


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
            # Not past the plane: the next one's first elements are written already.
            store_until(out, plane * size + i, (plane + 1) * size, (bytes_ >> (plane * bits)) & mask)


def unpack_bits(packed: np.ndarray, bits: int, out: np.ndarray) -> None:
    per = expect_bits("unpack_bits", bits)
    expect_size("unpack_bits", "packed", packed, ceil_div(out.size, per))
    _unpack_bits(as_writable(packed), bits, out)
