"""The steps of `floats` that move elements: group them by level, and restore their order.

With AVX-512, compress and expand instructions move sixteen elements at a time. Otherwise elements move one by one,
without branches. The lists of levels are `PITCH` apart, so that whole vectors may be written past their ends.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils
from numba.extending import intrinsic

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.lanes import (
    convert,
    convert_like,
    lanes_below,
    mask_bits,
    popcount,
    select,
    splat,
)
from gradwire.kernels.cpu.vector import load, store, u8, u32
from gradwire.kernels.float_format import CHUNK, LEVELS

_AT_ONCE = 16
PITCH = CHUNK + _AT_ONCE
_BY_VECTORS = bool(get_host_cpu_features().get("avx512f", False))

_VECTOR = ir.VectorType(ir.IntType(32), _AT_ONCE)
_MASK = ir.VectorType(ir.IntType(1), _AT_ONCE)


def _instruction(name):
    # Between registers only: with memory operands these instructions take ten times as long on some processors.
    @intrinsic
    def instruction(typingctx, vector, mask):
        def codegen(context, builder, sig, args):
            kind = ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _MASK])
            function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.avx512.mask.{name}.v16i32")
            return builder.call(function, [args[0], ir.Constant(_VECTOR, None), args[1]])

        return vector(vector, mask), codegen

    return instruction


_compressed = _instruction("compress")  # the lanes that are set in the mask, moved together, then zeros
_expanded = _instruction("expand")  # the first lanes, moved to those that are set in the mask; zeros elsewhere


# -- group -----------------------------------------------------------------------------------------------------


@kernel
def keep(x, form, kept):
    """Write the sign and mantissa of every element except +0."""
    bits, mantissa, _, _, _, _ = form
    count = np.int64(0)
    if _BY_VECTORS:
        for i in range(0, x.size, _AT_ONCE):
            values = convert(load(x, i, _AT_ONCE), u32)
            some = values != 0
            signed = ((values >> (bits - 1)) << mantissa) | (values & ((1 << mantissa) - 1))
            store(kept, count, _compressed(signed, some))
            count += popcount(mask_bits(some))
        return
    up, down, mask = np.uint32(mantissa), np.uint32(bits - 1), np.uint32((1 << mantissa) - 1)
    for i in range(x.size):
        value = np.uint32(x[i])
        kept[np.uint64(count)] = ((value >> down) << up) | (value & mask)
        count += np.int64(value != 0)


@kernel
def keep_by_level(x, form, by_level, levels):
    """Write the level of every element except +0, and signs and mantissas by level, without the bits it removes."""
    bits, mantissa, _, _, step, _ = form
    count, next_ = np.int64(0), np.empty(LEVELS, np.int64)
    for level in range(LEVELS):
        next_[level] = level * PITCH
    if _BY_VECTORS:
        zeros, ones = splat(np.uint32(0), _AT_ONCE), splat(np.uint32(1), _AT_ONCE)
        for i in range(0, x.size, _AT_ONCE):
            values = convert(load(x, i, _AT_ONCE), u32)
            some = values != 0
            signed = ((values >> (bits - 1)) << mantissa) | (values & ((1 << mantissa) - 1))
            found = zeros
            for level in range(1, LEVELS):
                found = found + select((values & ((1 << (level * step)) - 1)) == 0, ones, zeros)
            for level in range(LEVELS):
                chosen = some & (found == level)
                store(by_level, next_[level], _compressed(signed >> (level * step), chosen))
                next_[level] += popcount(mask_bits(chosen))
            store(levels, count, convert(_compressed(found, some), u8))
            count += popcount(mask_bits(some))
        return
    up, down, mask = np.uint32(mantissa), np.uint32(bits - 1), np.uint32((1 << mantissa) - 1)
    one, two, three = (np.uint32((1 << step) - 1), np.uint32((1 << (2 * step)) - 1), np.uint32((1 << (3 * step)) - 1))
    for i in range(x.size):
        value = np.uint32(x[i])
        level = np.uint64((value & one) == 0) + np.uint64((value & two) == 0) + np.uint64((value & three) == 0)
        signed = ((value >> down) << up) | (value & mask)
        place, some = next_[level], np.int64(value != 0)
        levels[np.uint64(count)] = np.uint8(level)
        by_level[np.uint64(place)] = signed >> (np.uint32(level) * np.uint32(step))
        next_[level] = place + some
        count += some


# -- restore the order -----------------------------------------------------------------------------------------


@kernel
def gather_levels(levels, step, by_level, kept):
    """Bring signs and mantissas into the order of elements; return False if one belongs to a higher level."""
    next_ = np.empty(LEVELS, np.int64)
    for level in range(LEVELS):
        next_[level] = level * PITCH
    wrong = np.int64(0)
    if _BY_VECTORS:
        for i in range(0, levels.size, _AT_ONCE):
            found = convert(load(levels, i, _AT_ONCE), u32)
            there = lanes_below(levels.size - i, _AT_ONCE)
            values = splat(np.uint32(0), _AT_ONCE)
            for level in range(LEVELS):
                chosen = there & (found == level)
                some = _expanded(load(by_level, next_[level], _AT_ONCE), chosen)
                next_[level] += popcount(mask_bits(chosen))
                if level < LEVELS - 1:
                    wrong |= np.int64(mask_bits(chosen & ((some & ((1 << step) - 1)) == 0)))
                values = values | (some << (level * step))
            store(kept, i, values)
        return wrong == 0
    below = np.uint32((1 << step) - 1)
    for i in range(levels.size):
        level = np.uint64(levels[i])
        value = by_level[np.uint64(next_[level])]
        next_[level] += 1
        wrong |= np.int64((value & below) == 0) & np.int64(level != np.uint64(LEVELS - 1))
        kept[i] = value << (np.uint32(level) * np.uint32(step))
    return wrong == 0


@kernel
def spread(symbols, is_kept, start, first, kept, form, back, out):
    """Write the elements of one stream, beginning with kept[first]; return the next index, or -1 if one is +0."""
    bits, mantissa, exponents, special, _, _ = form
    wrong, next_ = np.int64(0), np.int64(first)
    if _BY_VECTORS:
        zeros = splat(np.uint32(0), _AT_ONCE)
        for i in range(0, out.size, _AT_ONCE):
            some = (load(is_kept, start + i, _AT_ONCE) != 0) & lanes_below(out.size - i, _AT_ONCE)
            signed = _expanded(load(kept, next_, _AT_ONCE), some)
            next_ += popcount(mask_bits(some))
            symbol = convert(load(symbols, start + i, _AT_ONCE), u32)
            found = symbol + back
            found = select(found >= exponents, found - (exponents - 1), found)
            found = select((symbol != 0) & (symbol != special), found, zeros)
            value = ((signed >> mantissa) << (bits - 1)) | (found << mantissa) | (signed & ((1 << mantissa) - 1))
            wrong |= np.int64(mask_bits(some & (value == 0)))
            store(out, i, convert_like(select(some, value, zeros), out))
        return np.int64(-1) if wrong != 0 else next_
    up, down, mask = np.uint32(mantissa), np.uint32(bits - 1), np.uint32((1 << mantissa) - 1)
    for i in range(out.size):
        place = np.uint64(start + i)
        some = np.uint32(is_kept[place])
        signed = kept[np.uint64(next_)]
        symbol = np.int64(symbols[place])
        found = symbol + back
        found = found if found < exponents else found - (exponents - 1)
        found = found if symbol != 0 and symbol != special else 0
        value = (((signed >> up) << down) | (np.uint32(found) << up) | (signed & mask)) * some
        wrong |= np.int64(value == 0) & np.int64(some)
        out[i] = value
        next_ += np.int64(some)
    return np.int64(-1) if wrong != 0 else next_
