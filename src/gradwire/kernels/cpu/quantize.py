"""8-bit quantization with a scale per block, and its decoders. Contracts: `reference.quantize`.

Sweeps are divided into segments, which end at the end of a block or of the random numbers drawn so far.
"""
# Shapes: N elements, B elements per block, W ranks; scales are float32[ceil(N/B)]

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import LANES, addresses, as_input, as_writable, load_f32
from gradwire.kernels.cpu.lanes import convert, convert_like, floor, round_even, select, splat
from gradwire.kernels.cpu.random import fill_group16, key_words
from gradwire.kernels.cpu.vector import array_at, f32, i8, i32, load, store, store_until
from gradwire.kernels.layout import INT8_MAX, RANDOM16_GROUP, ceil_div, expect_same_ranks, expect_size

_RANDOM_STEP = np.float32(2**-16)
_HALF = np.float32(0.5)


@kernel
def _inverse(scale):
    inverse = np.float32(1) / scale
    return inverse if scale > 0 and 0 < inverse < np.inf else np.float32(0)


@kernel
def _clamped(y):
    """Integral floats as int32 in [-127, 127]; NaN becomes -127."""
    least, most = splat(np.float32(-INT8_MAX), LANES), splat(np.float32(INT8_MAX), LANES)
    y = select(y > -INT8_MAX, y, least)
    return convert(select(y < INT8_MAX, y, most), i32)


@kernel
def _quantize_nearest(x, scales, block, out, residual, has_residual):
    for b in range(scales.size):
        scale = scales[b]
        inverse, end = _inverse(scale), min(x.size, (b + 1) * block)
        for i in range(b * block, end, LANES):
            values = load_f32(x, i, LANES)
            q = _clamped(round_even(values * inverse))
            store_until(out, i, end, convert(q, i8))
            if has_residual:
                store_until(residual, i, end, values - convert(q, f32) * scale)


@kernel
def _quantize_segment(x, i, end, scale, noise, offset, out, residual, has_residual):
    inverse = _inverse(scale)
    for j in range(i, end, LANES):
        values = load_f32(x, j, LANES)
        u = convert(convert(load(noise, offset + j - i, LANES), i32), f32)
        q = _clamped(floor(values * inverse + (u + _HALF) * _RANDOM_STEP))
        store_until(out, j, end, convert(q, i8))
        if has_residual:
            store_until(residual, j, end, values - convert(q, f32) * scale)


@kernel
def _quantize_stochastic(x, scales, block, key_0, key_1, first, noise, out, residual, has_residual):
    i = 0
    while i < x.size:
        offset = (first + i) % RANDOM16_GROUP
        if offset == 0 or i == 0:
            fill_group16(key_0, key_1, (first + i) // RANDOM16_GROUP, noise, 0)
        b = i // block
        end = min(x.size, min((b + 1) * block, i + RANDOM16_GROUP - offset))
        _quantize_segment(x, i, end, scales[b], noise, offset, out, residual, has_residual)
        i = end


def quantize_int8(
    x: np.ndarray,
    scales: np.ndarray,
    block: int,
    key: int,
    first: int,
    out: np.ndarray,
    stochastic: bool,
    residual: np.ndarray | None = None,
) -> None:
    expect_size("quantize_int8", "scales", scales, ceil_div(x.size, block))
    expect_size("quantize_int8", "out", out, x.size)
    has_residual = residual is not None
    if residual is None:
        residual = np.empty(0, np.float32)
    else:
        expect_size("quantize_int8", "residual", residual, x.size)
    x, scales = as_input(x), as_writable(scales)
    if stochastic:
        noise = np.empty(RANDOM16_GROUP, np.uint16)
        _quantize_stochastic(x, scales, block, *key_words(key), first, noise, out, residual, has_residual)
    else:
        _quantize_nearest(x, scales, block, out, residual, has_residual)


@kernel
def _dequantize(q, scales, block, factor, out, accumulate):
    for b in range(scales.size):
        step, end = scales[b] * factor, min(out.size, (b + 1) * block)
        for i in range(b * block, end, LANES):
            values = convert(convert(load(q, i, LANES), i32), f32) * step
            if accumulate:
                values = values + load(out, i, LANES)
            store_until(out, i, end, values)


def dequantize_int8(q: np.ndarray, scales: np.ndarray, block: int, out: np.ndarray, accumulate: bool = False) -> None:
    expect_size("dequantize_int8", "q", q, out.size)
    expect_size("dequantize_int8", "scales", scales, ceil_div(out.size, block))
    _dequantize(as_writable(q), as_writable(scales), block, np.float32(1), out, accumulate)


@kernel
def _dequantize_sum(q, scales, block, num_blocks, out):
    for b in range(num_blocks):
        end = min(out.size, (b + 1) * block)
        for i in range(b * block, end, LANES):
            total = splat(np.float32(0), LANES)
            for rank in range(q.size):
                levels = load(array_at(q[rank], out.size, i8), i, LANES)
                scale = array_at(scales[rank], num_blocks, f32)[b]
                total = total + convert(convert(levels, i32), f32) * scale
            store_until(out, i, end, total)


def dequantize_int8_sum(q: Sequence[np.ndarray], scales: Sequence[np.ndarray], block: int, out: np.ndarray) -> None:
    expect_same_ranks("dequantize_int8_sum", q, scales)
    num_blocks = ceil_div(out.size, block)
    for levels, steps in zip(q, scales):
        expect_size("dequantize_int8_sum", "q", levels, out.size)
        expect_size("dequantize_int8_sum", "scales", steps, num_blocks)
    _dequantize_sum(addresses(q, np.int8), addresses(scales, np.float32), block, num_blocks, out)


@kernel
def _add(x, out):
    for i in range(0, x.size, LANES):
        store(out, i, load(out, i, LANES) + convert_like(load(x, i, LANES), out))


def add_int8(x: np.ndarray, out: np.ndarray) -> None:
    expect_size("add_int8", "out", out, x.size)
    if x.dtype.kind != "i" or out.dtype.kind != "i" or x.dtype.itemsize > out.dtype.itemsize:
        raise TypeError(f"Expected an accumulator at least as wide as {x.dtype}, got {out.dtype} (in add_int8).")
    _add(as_writable(x), out)


def finalize_int8(accumulator: np.ndarray, scales: np.ndarray, block: int, factor: float, out: np.ndarray) -> None:
    expect_size("finalize_int8", "accumulator", accumulator, out.size)
    expect_size("finalize_int8", "scales", scales, ceil_div(out.size, block))
    _dequantize(as_writable(accumulator), as_writable(scales), block, np.float32(factor), out, False)
