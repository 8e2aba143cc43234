"""Elementwise sweeps over a gradient. Contracts: `reference.sweep`."""
# Shapes: N elements

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import INFINITY_BITS, LANES, MAGNITUDE, addresses, as_input, load_f32, store_f32
from gradwire.kernels.cpu.lanes import bitcast, largest_lane, maximum, splat
from gradwire.kernels.cpu.reduce import magnitude_of
from gradwire.kernels.cpu.vector import array_at, i32, load, store
from gradwire.kernels.layout import expect_size
from gradwire.kernels.reference import sweep as reference


@kernel
def _cast(x, out, scale):
    for i in range(0, x.size, LANES):
        store_f32(out, i, load_f32(x, i, LANES) * scale)


@kernel
def _convert(x, out):
    for i in range(0, x.size, LANES):
        store_f32(out, i, load_f32(x, i, LANES))


def cast(x: np.ndarray, out: np.ndarray, scale: float = 1.0) -> None:
    expect_size("cast", "out", out, x.size)
    factor = np.float32(scale)
    if factor != 1:
        _cast(as_input(x), as_input(out), factor)
    elif x.dtype == out.dtype:
        np.copyto(out, x)
    else:
        _convert(as_input(x), as_input(out))


@kernel
def _scale(x, scale, out):
    largest = splat(np.int32(0), LANES)
    for i in range(0, x.size, LANES):
        values = load_f32(x, i, LANES) * scale
        store(out, i, values)
        largest = maximum(largest, bitcast(values, i32) & MAGNITUDE)
    return largest_lane(largest)


@kernel
def compensate_bits(x, scale, residual, out):
    """`compensate`, which returns the bits of the largest magnitude."""
    largest = splat(np.int32(0), LANES)
    for i in range(0, x.size, LANES):
        values = load_f32(x, i, LANES) * scale + load(residual, i, LANES)
        store(out, i, values)
        largest = maximum(largest, bitcast(values, i32) & MAGNITUDE)
    return largest_lane(largest)


def compensate(x: np.ndarray, scale: float, residual: np.ndarray | None, out: np.ndarray) -> np.float32:
    expect_size("compensate", "out", out, x.size)
    if residual is None:
        return magnitude_of(_scale(as_input(x), np.float32(scale), out))
    expect_size("compensate", "residual", residual, x.size)
    return magnitude_of(compensate_bits(as_input(x), np.float32(scale), residual, out))


@kernel
def advance(x, scale, velocity, momentum, out):
    for i in range(0, x.size, LANES):
        store(out, i, load(velocity, i, LANES) * momentum + load_f32(x, i, LANES) * scale)


def advance_velocity(x: np.ndarray, scale: float, velocity: np.ndarray, momentum: float, out: np.ndarray) -> None:
    expect_size("advance_velocity", "velocity", velocity, x.size)
    expect_size("advance_velocity", "out", out, x.size)
    advance(as_input(x), np.float32(scale), velocity, np.float32(momentum), out)


@kernel
def _accumulate(x, out):
    for i in range(0, x.size, LANES):
        store(out, i, load(out, i, LANES) + load_f32(x, i, LANES))


def accumulate(x: np.ndarray, out: np.ndarray) -> None:
    expect_size("accumulate", "out", out, x.size)
    _accumulate(as_input(x), out)


@kernel
def _weighted_sum(places, scales, out):
    largest = splat(np.int32(0), LANES)
    for i in range(0, out.size, LANES):
        total = load_f32(array_at(places[0], out.size, out), i, LANES) * scales[0]
        for j in range(1, places.size):
            total = total + load_f32(array_at(places[j], out.size, out), i, LANES) * scales[j]
        store_f32(out, i, total)
        largest = maximum(largest, bitcast(load_f32(out, i, LANES), i32) & MAGNITUDE)  # rounding may overflow
    return largest_lane(largest) < INFINITY_BITS


def weighted_sum(arrays: Sequence[np.ndarray], scales: Sequence[float], out: np.ndarray) -> bool:
    for x in arrays:
        expect_size("weighted_sum", "x", x, out.size)
    if out.dtype == np.float64:  # kernels calculate in float32
        return reference.weighted_sum(arrays, scales, out)
    return bool(_weighted_sum(addresses(arrays, out.dtype.type), np.array(scales, np.float32), as_input(out)))
