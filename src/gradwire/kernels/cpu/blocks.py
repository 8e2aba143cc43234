"""Rotated blocks quantized to table values, and back. Contracts: `reference.blocks`.

Each block, or chunk of indices, passes through the cache once: scale, flip signs, transform, quantize, pack, and for
the residual transform back.
"""
# Shapes: N elements, P = N with the last block padded, G blocks

from __future__ import annotations

import numpy as np

from gradwire.kernels.blocks import INDEX_CHUNK, BlockLayout, expect_blocks, expect_index_bits, index_bytes
from gradwire.kernels.cpu import whole_blocks
from gradwire.kernels.cpu.compile import inlined, kernel
from gradwire.kernels.cpu.elements import LANES, as_input, as_writable, load_f32
from gradwire.kernels.cpu.hadamard import transform
from gradwire.kernels.cpu.lanes import (
    bitcast,
    bits_mask,
    convert,
    convert_like,
    lanes_below,
    largest_lane,
    maximum,
    minimum,
    select,
    smallest_lane,
    splat,
    sum_lanes,
)
from gradwire.kernels.cpu.lookup import ENTRIES, lookup
from gradwire.kernels.cpu.random import fill16, key_words
from gradwire.kernels.cpu.vector import f32, f64, i32, load, store_until, u8, u32
from gradwire.kernels.layout import RANDOM16_GROUP, ceil_div, expect_size

_LARGEST = np.float32(np.finfo(np.float32).max)
_SIGN = np.uint32(1 << 31)
_RANDOM_STEP, _HALF = np.float32(2**-16), np.float32(0.5)


# -- coordinates ---------------------------------------------------------------------------------------------------


@kernel
def _block_square_sums(x, block, out):
    for b in range(out.size):
        total = splat(0.0, LANES)
        for i in range(b * block, min(x.size, (b + 1) * block), LANES):
            values = convert(load_f32(x, i, LANES), f64)
            total = total + values * values
        out[b] = sum_lanes(total)


def block_square_sums(x: np.ndarray, block: int, out: np.ndarray) -> None:
    expect_size("block_square_sums", "out", out, ceil_div(x.size, block))
    _block_square_sums(as_input(x), block, out)


@inlined
def _flipped(values, signs, place):
    """64 floats, negated where the sign bit of their position is set."""
    word, bit = np.uint64(place) >> np.uint64(5), np.uint64(place) & np.uint64(31)
    low = np.uint64(signs[word]) | (np.uint64(signs[word + np.uint64(1)]) << np.uint64(32))
    high = np.uint64(signs[word + np.uint64(2)])
    flips = (low >> bit) | ((high << np.uint64(1)) << (np.uint64(63) - bit))
    mask = select(bits_mask(flips), splat(_SIGN, LANES), splat(np.uint32(0), LANES))
    return bitcast(bitcast(values, u32) ^ mask, f32)


@kernel
def _rotate(x, start, count, unit, signs, shift, work, at):
    """Write the coordinates of one block to work[at : at + count]."""
    for j in range(0, count, LANES):
        values = load_f32(x, start + j, LANES) * unit
        if signs.size > 0:
            values = _flipped(values, signs, shift + start + j)
        store_until(work, at + j, at + count, values)
    if signs.size > 0:
        transform(work, at, count)


@kernel
def _block_extremes(x, padded, block, units, signs, shift, work, low, high):
    for b in range(units.size):
        start = b * block
        count = min(block, padded - start)
        _rotate(x, start, count, units[b], signs, shift, work, 0)
        least, most = splat(np.float32(np.inf), LANES), splat(np.float32(-np.inf), LANES)
        for j in range(0, count, LANES):
            values, inside = load(work, j, LANES), lanes_below(count - j, LANES)
            least = select(inside, minimum(values, least), least)
            most = select(inside, maximum(values, most), most)
        zero = np.float32(0)  # turns -0 into +0: which of two zeros is found depends on the order
        low[b], high[b] = smallest_lane(least) + zero, largest_lane(most) + zero


def block_extremes(
    x: np.ndarray, blocks: BlockLayout, units: np.ndarray, work: np.ndarray, low: np.ndarray, high: np.ndarray
) -> None:
    expect_blocks("block_extremes", blocks, x.size, work, units, low, high)
    _block_extremes(as_input(x), blocks.padded, blocks.block, units, blocks.signs, blocks.shift, work, low, high)


# -- encode --------------------------------------------------------------------------------------------------------


@inlined
def _in_table_units(work, at, low, rate, top):
    """64 coordinates in units of the table, clamped to its range; NaN becomes 0."""
    z = (load(work, at, LANES) - low) * rate
    return minimum(maximum(z, splat(np.float32(0), LANES)), splat(top, LANES))


@inlined
def _uniform(noise, at):
    return (convert(convert(load(noise, at, LANES), i32), f32) + _HALF) * _RANDOM_STEP


@inlined
def _bisected(z, table, index, step):
    """`index` + `step` where the table value there is at most z, else `index`."""
    higher = index + step
    return select(z >= lookup(table, higher), higher, index)


@kernel
def _quantize_few(work, at, count, low, rate, top, noise, levels, j0, values, gaps, keep):
    """Indices into a table of up to 16 values, by bisection in registers. With `keep`, also the centered values."""
    table, steps = load(values, 0, ENTRIES), load(gaps, 0, ENTRIES)
    for j in range(0, count, LANES):
        z = _in_table_units(work, at + j, low, rate, top)
        index = splat(np.int32(0), LANES)
        index = _bisected(z, table, index, 8)
        index = _bisected(z, table, index, 4)
        index = _bisected(z, table, index, 2)
        index = _bisected(z, table, index, 1)
        above = z - lookup(table, index) > _uniform(noise, j0 + j) * lookup(steps, index)
        index = select(above, index + 1, index)
        store_until(levels, j0 + j, j0 + count, convert(index, u8))
        if keep:
            store_until(work, at + j, at + count, lookup(table, index) - top * _HALF)


@kernel
def _quantize_many(work, at, count, low, rate, top, noise, levels, j0, values, gaps, cells, keep):
    """Indices into a table of any size. `cells` holds the index of the table value below each integer."""
    for j in range(count):
        z = (work[at + j] - low) * rate
        z = z if z > 0 else np.float32(0)
        z = z if z < top else top
        index = cells[np.int64(z)]
        u = (np.float32(noise[j0 + j]) + _HALF) * _RANDOM_STEP
        index += np.int64(z - values[index] > u * gaps[index])
        levels[j0 + j] = index
        if keep:
            work[at + j] = values[index] - top * _HALF


@kernel
def _pack_plane(levels, count, shift, width, out, at):
    """Pack `width` bits of each of `count` levels as a planar chunk; return where it ends."""
    per, mask = 8 // width, (1 << width) - 1
    size = (count + per - 1) // per
    for j in range(0, size, LANES):
        packed = (load(levels, j, LANES) >> shift) & mask
        for plane in range(1, per):
            packed = packed | (((load(levels, plane * size + j, LANES) >> shift) & mask) << (plane * width))
        store_until(out, at + j, at + size, packed)
    return at + size


@kernel
def _pack_chunk(levels, count, bits, out, at):
    levels[count : 8 * ((count + 7) // 8)] = 0
    shift = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            at = _pack_plane(levels, count, shift, width, out, at)
            shift += width
    return at


@inlined
def _finite(values):
    return minimum(maximum(values, splat(-_LARGEST, LANES)), splat(_LARGEST, LANES))


@kernel
def _update_residual(x, start, count, work, at, factor, base, signs, shift, residual):
    """Write the residual of one block, whose centered values are in `work`."""
    if signs.size > 0:
        transform(work, at, count)
    end = min(start + count, residual.size)
    for j in range(0, count, LANES):
        sent = _finalized(work, at, j, factor, base, signs, shift + start)
        store_until(residual, start + j, end, _finite(load_f32(x, start + j, LANES) - sent))


@kernel
def _encode(
    x, begin, padded, block, units, lows, rates, signs, shift, values, gaps, cells, bits, key_0, key_1, first, scratch,
    work, out, packed, top, factors, bases, residual, keep,
):  # fmt: skip
    """Encode the elements from `begin` on, and pack their indices from out[packed] on."""
    unit = max(block, INDEX_CHUNK)
    noise, spare, levels = scratch
    for start in range(begin, padded, unit):
        count = min(unit, padded - start)
        for i in range(0, count, block):
            b = (start + i) // block
            _rotate(x, start + i, min(block, count - i), units[b], signs, shift, work, i)
        for c in range(0, count, INDEX_CHUNK):
            chunk = min(INDEX_CHUNK, count - c)
            fill16(key_0, key_1, first + start + c, chunk, spare, noise)
            for j in range(0, chunk, block):
                b, length = (start + c + j) // block, min(block, chunk - j)
                if bits <= 4:
                    _quantize_few(work, c + j, length, lows[b], rates[b], top, noise, levels, j, values, gaps, keep)
                else:
                    _quantize_many(
                        work, c + j, length, lows[b], rates[b], top, noise, levels, j, values, gaps, cells, keep
                    )
            packed = _pack_chunk(levels, chunk, bits, out, packed)
        if keep:
            for i in range(0, count, block):
                b = (start + i) // block
                length = min(block, count - i)
                _update_residual(x, start + i, length, work, i, factors[b], bases[b], signs, shift, residual)


def encode_indices(
    x: np.ndarray,
    blocks: BlockLayout,
    units: np.ndarray,
    lows: np.ndarray,
    rates: np.ndarray,
    table: np.ndarray,
    bits: int,
    key: int,
    first: int,
    work: np.ndarray,
    out: np.ndarray,
    factors: np.ndarray,
    bases: np.ndarray,
    residual: np.ndarray | None = None,
) -> None:
    expect_blocks("encode_indices", blocks, x.size, work, units, lows, rates, factors, bases)
    expect_index_bits("encode_indices", bits, table)
    expect_size("encode_indices", "out", out, index_bytes(blocks.padded, bits))
    if residual is not None:
        expect_size("encode_indices", "residual", residual, x.size)
    x, keys, top, begin = as_input(x), key_words(key), np.float32(table[-1]), 0
    if _has_whole_blocks(blocks, bits, first) and (cells := whole_blocks.cells_of(table.tobytes())):
        num_whole = blocks.size // whole_blocks.BLOCK
        begin = num_whole * whole_blocks.BLOCK
        whole_blocks.encode(
            x, num_whole, units, lows, rates, blocks.signs, cells, keys, first, work, out, top, factors, bases, residual
        )  # fmt: skip
    if begin < blocks.padded:
        _encode(
            x, begin, blocks.padded, blocks.block, units, lows, rates, blocks.signs, blocks.shift, *_prepared(table),
            bits, *keys, first, _scratch(), work, out, index_bytes(begin, bits), top, factors, bases,
            work[:0] if residual is None else residual, residual is not None,
        )  # fmt: skip


def _has_whole_blocks(blocks: BlockLayout, bits: int, first: int) -> bool:
    """Whether blocks are those of `whole_blocks`, up to the last one."""
    is_aligned = first % whole_blocks.BLOCK == 0 and blocks.shift == 0
    return bits == 4 and blocks.rotated and blocks.block == whole_blocks.BLOCK and is_aligned


def _scratch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random numbers of a chunk, those of a group, and indices of a chunk."""
    return np.empty(INDEX_CHUNK, np.uint16), np.empty(RANDOM16_GROUP, np.uint16), np.empty(INDEX_CHUNK, np.uint8)


def _prepared(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The table's values and the gaps above them, padded to 16, and the index of the value below each integer."""
    values = np.full(max(ENTRIES, table.size), np.inf, np.float32)
    gaps = np.zeros(values.size, np.float32)
    values[: table.size] = table
    gaps[: table.size - 1] = np.diff(values[: table.size])
    cells = np.searchsorted(table, np.arange(int(table[-1]) + 1), side="right") - 1
    return values, gaps, cells.astype(np.int64)


# -- accumulate and finalize ---------------------------------------------------------------------------------------


@kernel
def _unpack_chunk(packed, at, count, bits, levels):
    """Undo `_pack_chunk`; return where the chunk ends."""
    shift = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            per, mask = 8 // width, (1 << width) - 1
            size = (count + per - 1) // per
            for j in range(0, size, LANES):
                bytes_ = load(packed, at + j, LANES)
                for plane in range(per):
                    found = ((bytes_ >> (plane * width)) & mask) << shift
                    place = plane * size + j
                    if shift > 0:
                        found = found | load(levels, place, LANES)
                    store_until(levels, place, (plane + 1) * size, found)
            at += size
            shift += width
    return at


@kernel
def _lookup_indices(packed, bits, table, small, levels, accumulator, accumulate):
    at = 0
    for start in range(0, accumulator.size, INDEX_CHUNK):
        count = min(INDEX_CHUNK, accumulator.size - start)
        at = _unpack_chunk(packed, at, count, bits, levels)
        if small.size > 0:
            entries = load(small, 0, ENTRIES)
            for j in range(0, count, LANES):
                values = convert_like(lookup(entries, load(levels, j, LANES)), accumulator)
                if accumulate:
                    values = values + load(accumulator, start + j, LANES)
                store_until(accumulator, start + j, start + count, values)
        elif accumulate:
            for j in range(count):
                accumulator[start + j] += table[levels[j]]
        else:
            for j in range(count):
                accumulator[start + j] = table[levels[j]]


def lookup_indices(
    packed: np.ndarray, bits: int, table: np.ndarray, accumulator: np.ndarray, accumulate: bool = False
) -> None:
    expect_index_bits("lookup_indices", bits, table)
    expect_size("lookup_indices", "packed", packed, index_bytes(accumulator.size, bits))
    small = np.zeros(ENTRIES if bits <= 4 and table[-1] < 256 else 0, np.uint8)
    if small.size:
        small[: table.size] = table
    levels = np.zeros(INDEX_CHUNK + 8, np.uint8)  # a partial byte is unpacked whole
    _lookup_indices(as_writable(packed), bits, table, small, levels, accumulator, accumulate)


@inlined
def _finalized(work, at, j, factor, base, signs, place):
    """64 elements from coordinate j of the block at work[at], whose first sign bit is `place`."""
    values = load(work, at + j, LANES) * factor
    added = splat(base, LANES)
    if signs.size > 0:
        none = splat(np.float32(0), LANES)
        values = values + select(lanes_below(1 - j, LANES), added, none)
        values = _flipped(values, signs, place + j)
    else:
        values = values + added
    return _finite(values)


@kernel
def _finalize(accumulator, padded, block, halves, factors, bases, signs, shift, work, out, accumulate):
    for b in range(factors.size):
        start = b * block
        count, half = min(block, padded - start), halves[b]
        for j in range(0, count, LANES):
            store_until(work, j, count, convert(load(accumulator, start + j, LANES), f32) - half)
        if signs.size > 0:
            transform(work, 0, count)
        end = min(out.size, start + count)
        for j in range(0, count, LANES):
            values = _finalized(work, 0, j, factors[b], bases[b], signs, shift + start)
            if accumulate:
                values = values + load(out, start + j, LANES)
            store_until(out, start + j, end, values)


def finalize_blocks(
    accumulator: np.ndarray,
    blocks: BlockLayout,
    halves: np.ndarray,
    factors: np.ndarray,
    bases: np.ndarray,
    work: np.ndarray,
    out: np.ndarray,
    accumulate: bool = False,
) -> None:
    expect_blocks("finalize_blocks", blocks, out.size, work, halves, factors, bases)
    expect_size("finalize_blocks", "accumulator", accumulator, blocks.padded)
    _finalize(
        as_writable(accumulator), blocks.padded, blocks.block, halves, factors, bases, blocks.signs, blocks.shift, work,
        out, accumulate,
    )  # fmt: skip
