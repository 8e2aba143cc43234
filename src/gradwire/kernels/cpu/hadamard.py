"""The Hadamard transform of blocks. Contracts: `reference.hadamard`.

Sixteen vectors of sixteen floats are in registers at a time: with one load and store of 256 elements, four levels are
done within lanes, by shuffles, and four across registers. Higher levels take passes over the block of up to four levels
each. A block larger than the first-level cache is first transformed in pieces that fit it.
"""
# Shapes: N elements, B elements per block

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.vector import _place

LANES = 16
_BASE = 256
_PIECE = 4096  # elements: 16 KiB, half of the smallest first-level cache


def _shuffled(builder, value, lanes):
    chosen = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), chosen)


def _within(builder, value, apart):
    """One level, between lanes `apart` from each other."""
    count = value.type.count
    other = _shuffled(builder, value, [lane ^ apart for lane in range(count)])
    total, difference = builder.fadd(value, other), builder.fsub(other, value)
    chosen = [count + lane if lane & apart else lane for lane in range(count)]
    return builder.shuffle_vector(total, difference, ir.Constant(ir.VectorType(ir.IntType(32), count), chosen))


def _across(builder, values):
    """All levels across vectors, the nearest first."""
    apart = 1
    while apart < len(values):
        for low in range(len(values)):
            if not low & apart:
                a, b = values[low], values[low + apart]
                values[low], values[low + apart] = builder.fadd(a, b), builder.fsub(a, b)
        apart *= 2


def _vectors(context, builder, array, value, index, index_type, stride, count):
    """Pointers to `count` vectors, `stride` (IR) elements apart."""
    kind = ir.VectorType(ir.FloatType(), LANES).as_pointer()
    pointer, _ = _place(context, builder, array, value, index, index_type)
    places = [builder.gep(pointer, [builder.mul(stride, ir.Constant(stride.type, r))]) for r in range(count)]
    return [builder.bitcast(place, kind) for place in places]


@intrinsic(prefer_literal=True)
def _transform_neighbors(typingctx, array, index, size):
    """All levels of `size` (16 to 256) neighboring floats, in place; they must lie inside the array."""
    count = size.literal_value // LANES

    def codegen(context, builder, sig, args):
        stride = ir.Constant(ir.IntType(64), LANES)
        places = _vectors(context, builder, array, args[0], args[1], sig.args[1], stride, count)
        values = [builder.load(place, align=4) for place in places]
        for apart in (1, 2, 4, 8):
            values = [_within(builder, value, apart) for value in values]
        _across(builder, values)
        for place, value in zip(places, values):
            builder.store(value, place, align=4)
        return context.get_dummy_value()

    return types.void(array, index, size), codegen


@intrinsic(prefer_literal=True)
def _transform_apart(typingctx, array, index, stride, count):
    """The levels between `count` vectors of 16 floats, `stride` elements apart, in place."""

    def codegen(context, builder, sig, args):
        step = context.cast(builder, args[2], sig.args[2], types.int64)
        places = _vectors(context, builder, array, args[0], args[1], sig.args[1], step, count.literal_value)
        values = [builder.load(place, align=4) for place in places]
        _across(builder, values)
        for place, value in zip(places, values):
            builder.store(value, place, align=4)
        return context.get_dummy_value()

    return types.void(array, index, stride, count), codegen


@kernel
def _transform_few(x, start, size):
    """All levels of a block shorter than a vector."""
    apart = 1
    while apart < size:
        for base in range(start, start + size, 2 * apart):
            for i in range(base, base + apart):
                a, b = x[i], x[i + apart]
                x[i], x[i + apart] = a + b, a - b
        apart *= 2


@kernel
def _transform_lowest(x, start, size):
    """All levels of up to 256 elements; the lowest eight levels of more."""
    if size >= _BASE:
        for i in range(start, start + size, _BASE):
            _transform_neighbors(x, i, 256)
    elif size == 128:
        _transform_neighbors(x, start, 128)
    elif size == 64:
        _transform_neighbors(x, start, 64)
    elif size == 32:
        _transform_neighbors(x, start, 32)
    elif size == 16:
        _transform_neighbors(x, start, 16)
    else:
        _transform_few(x, start, size)


@kernel
def _transform_higher(x, start, size, apart):
    """The levels from distance `apart` on."""
    while apart < size:
        left = size // apart
        step = 16 if left >= 16 else left
        for base in range(start, start + size, step * apart):
            for i in range(base, base + apart, LANES):
                if step == 16:
                    _transform_apart(x, i, apart, 16)
                elif step == 8:
                    _transform_apart(x, i, apart, 8)
                elif step == 4:
                    _transform_apart(x, i, apart, 4)
                else:
                    _transform_apart(x, i, apart, 2)
        apart *= step


@kernel
def transform(x, start, size):
    """Transform x[start : start + size]; `size` is a power of two."""
    piece = min(size, _PIECE)
    for at in range(start, start + size, piece):
        _transform_lowest(x, at, piece)
        _transform_higher(x, at, piece, _BASE)
    _transform_higher(x, start, size, piece if piece >= _BASE else size)


@kernel
def _hadamard(x, block):
    for start in range(0, x.size, block):
        transform(x, start, block)


def hadamard(x: np.ndarray, block: int) -> None:
    if block < 1 or block & (block - 1) or x.size % block:
        raise ValueError(f"Expected whole blocks of a power of two, got {x.size} elements in {block} (in hadamard).")
    if x.dtype != np.float32:
        raise TypeError(f"Expected float32, got {x.dtype} (in hadamard).")
    _hadamard(x, block)
