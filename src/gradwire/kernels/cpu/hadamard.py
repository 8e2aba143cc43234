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
from gradwire.kernels.cpu.elements import _WIDEN
from gradwire.kernels.cpu.vector import _broadcast, _element_ir, _place, _prefetch

LANES = 16
NEIGHBORS = 256  # elements in registers at a time
_PIECE = 4096  # elements: 16 KiB, half of the smallest first-level cache


def _shuffled(builder, value, lanes):
    chosen = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), chosen)


def _within(builder, value, apart):
    """One level, between lanes `apart` from each other: each lane, or minus it, plus the other.

    A product with 1 or -1 is exact. So where the processor can fuse it with the addition, the result is the same.
    """
    count = value.type.count
    other = _shuffled(builder, value, [lane ^ apart for lane in range(count)])
    signs = ir.Constant(value.type, [-1.0 if lane & apart else 1.0 for lane in range(count)])
    return builder.fadd(builder.fmul(value, signs, flags=["contract"]), other, flags=["contract"])


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
    kind = ir.VectorType(_element_ir(array.dtype), LANES).as_pointer()
    pointer, _ = _place(context, builder, array, value, index, index_type)
    places = [builder.gep(pointer, [builder.mul(stride, ir.Constant(stride.type, r))]) for r in range(count)]
    return [builder.bitcast(place, kind) for place in places]


def _all_levels(builder, values):
    """All levels of neighboring vectors."""
    for apart in (1, 2, 4, 8):
        values = [_within(builder, value, apart) for value in values]
    _across(builder, values)
    return values


_NEXT = ir.Constant(ir.IntType(64), LANES)


@intrinsic(prefer_literal=True)
def transform_neighbors(typingctx, array, index, size):
    """All levels of `size` (16 to 256) neighboring floats, in place; they must lie inside the array."""
    count = size.literal_value // LANES

    def codegen(context, builder, sig, args):
        places = _vectors(context, builder, array, args[0], args[1], sig.args[1], _NEXT, count)
        _prefetch(builder, places[0], 4 * size.literal_value)  # large arrays took 1.25 times as long without
        values = [builder.load(place, align=4) for place in places]
        for place, value in zip(places, _all_levels(builder, values)):
            builder.store(value, place, align=4)
        return context.get_dummy_value()

    return types.void(array, index, size), codegen


@intrinsic
def transform_loaded(typingctx, source, start, unit, masks, mask, work, at):
    """All levels of 256 elements from source[start], times `unit`, written to work[at].

    Elements are of any type; each whose bit is set is negated. Bits are in `masks`, uint16, from masks[mask] on.
    """
    count = NEIGHBORS // LANES

    def codegen(context, builder, sig, args):
        def places(k):
            return _vectors(context, builder, sig.args[k], args[k], args[k + 1], sig.args[k + 1], _NEXT, count)

        sources = places(0)
        _prefetch(builder, sources[0], NEIGHBORS * source.dtype.bitwidth // 8)
        first_mask, _ = _place(context, builder, masks, args[3], args[4], mask)
        values = []
        for r, place in enumerate(sources):
            loaded = builder.load(place, align=source.dtype.bitwidth // 8)
            value = _WIDEN[source.dtype](builder, loaded, LANES)
            value = builder.fmul(value, _broadcast(builder, args[2], value.type))
            bits = builder.load(builder.gep(first_mask, [ir.Constant(ir.IntType(64), r)]))
            flipped = builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))
            values.append(builder.select(flipped, builder.fneg(value), value))
        for place, value in zip(places(5), _all_levels(builder, values)):
            builder.store(value, place, align=4)
        return context.get_dummy_value()

    return types.void(source, start, types.float32, masks, mask, work, at), codegen


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
    if size >= NEIGHBORS:
        for i in range(start, start + size, NEIGHBORS):
            transform_neighbors(x, i, 256)
    elif size == 128:
        transform_neighbors(x, start, 128)
    elif size == 64:
        transform_neighbors(x, start, 64)
    elif size == 32:
        transform_neighbors(x, start, 32)
    elif size == 16:
        transform_neighbors(x, start, 16)
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
        _transform_higher(x, at, piece, NEIGHBORS)
    _transform_higher(x, start, size, piece if piece >= NEIGHBORS else size)


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
