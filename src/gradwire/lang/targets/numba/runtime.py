"""Functions called by generated Numba code: vectors and lanes of `kernels.cpu`, and helpers of the language."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import inlined, kernel
from gradwire.kernels.cpu.elements import (
    INFINITY_BITS,
    LANES,
    MAGNITUDE,
    load_f32,
    rounded_bfloat16,
    rounded_float16,
    store_f32,
)
from gradwire.kernels.cpu.hashing import keep_hashed
from gradwire.kernels.cpu.lanes import (
    as_bytes,
    bitcast,
    bits_mask,
    ceil,
    convert,
    first_lane,
    floor,
    from_bytes,
    lanes_below,
    largest_lane,
    mask_bits,
    maximum,
    minimum,
    popcount,
    round_even,
    select,
    smallest_lane,
    splat,
    sqrt,
    sum_lanes,
    trailing_zeros,
)
from gradwire.kernels.cpu.positions import coded_bytes, read_positions, write_positions
from gradwire.kernels.cpu.random import fill16, fill_group32
from gradwire.kernels.cpu.reduce import LEVELS, finish, push
from gradwire.kernels.cpu.select import scatter_lists
from gradwire.kernels.cpu.vector import (
    array_at,
    f32,
    f64,
    i8,
    i16,
    i32,
    load,
    store,
    store_until,
    u8,
    u16,
    u32,
)
from gradwire.kernels.cpu.zero_run import expand_runs, shorten_runs
from gradwire.kernels.layout import RANDOM32_GROUP, SUM_BLOCK

CHUNK = SUM_BLOCK
LARGEST = np.float64(np.finfo(np.float32).max)
_STREAM_STEP = np.uint32(0x85EBCA6B)
_HALF, _UNIT = np.float32(0.5), np.float32(2**-16)
# Selections write this many pairs at a time, even where there are fewer.
SLOTS = 4
_POWERS = np.array([81, 27, 9, 3, 1], np.int64)


# -- numbers -------------------------------------------------------------------------------------------------


@kernel
def narrow(value):
    """Round a float64 to a finite float32; NaN becomes 0."""
    if value != value:
        return np.float32(0)
    return np.float32(min(max(value, -LARGEST), LARGEST))


@kernel
def extreme(value):
    """A smallest or largest lane of finite values as float64; 0 if no lane was chosen. Never -0."""
    return 0.0 if np.isinf(value) else np.float64(value) + 0.0


@kernel
def magnitude(x):
    """Absolute values."""
    return bitcast(bitcast(x, i32) & MAGNITUDE, f32)


@kernel
def magnitude_bits(x):
    """Absolute values as integers in the same order."""
    return bitcast(x, i32) & MAGNITUDE


@kernel
def inverted(mask):
    """The opposite of a mask."""
    return mask ^ splat(True, LANES)


@kernel
def number(mask):
    """1 where the mask is true, else 0."""
    return select(mask, splat(np.float32(1), LANES), splat(np.float32(0), LANES))


@kernel
def exponent(x):
    """Biased exponents, as floats."""
    return convert((bitcast(x, i32) >> 23) & 255, f32)


@kernel
def power(e):
    """Powers of two, from biased exponents."""
    return bitcast(convert(e, i32) << 23, f32)


@kernel
def integers(y, low, high):
    """Truncate and clamp to integers in [low, high], as int32; NaN becomes 0."""
    zero, most = splat(np.float32(0), LANES), splat(high, LANES)
    if low < 0:
        least = splat(low, LANES)
        y = select(y == y, y, zero)
        y = select(y > least, y, least)
    else:
        y = select(y > zero, y, zero)  # a NaN is not above 0
    return convert(select(y < most, y, most), i32)


@kernel
def bounded(y, largest):
    """Clamp magnitudes to `largest`; NaN becomes 0."""
    y = select(y == y, y, splat(np.float32(0), LANES))
    return minimum(maximum(y, splat(-largest, LANES)), splat(largest, LANES))


@kernel
def finite(y):
    """Clamp to finite floats; NaN becomes 0."""
    return bounded(y, np.float32(LARGEST))


@kernel
def all_finite(values):
    """Whether all floats of an array are finite."""
    largest = splat(np.int32(0), LANES)
    for i in range(0, values.size, LANES):
        largest = maximum(largest, magnitude_bits(load_f32(values, i, LANES)))
    return largest_lane(largest) < INFINITY_BITS


@kernel
def largest_of(values):
    """Largest magnitude of an array, float64; NaN if an element is not finite."""
    largest = splat(np.int32(0), LANES)
    for i in range(0, values.size, LANES):
        largest = maximum(largest, magnitude_bits(load_f32(values, i, LANES)))
    bits = largest_lane(largest)
    return np.nan if bits >= INFINITY_BITS else np.float64(first_lane(bitcast(splat(bits, 1), f32)))


@kernel
def sums(size):
    """Scratch memory for a canonical sum of `size` numbers: its levels, and how full each is."""
    num_levels, capacity = 1, SUM_BLOCK * SUM_BLOCK
    while capacity < size:
        num_levels, capacity = num_levels + 1, capacity * SUM_BLOCK
    return np.empty(num_levels * SUM_BLOCK + 1, np.float64), np.zeros(LEVELS, np.int64)


# -- random --------------------------------------------------------------------------------------------------


@kernel
def draw(keys, shared, stream, first, count, scratch, noise):
    """Write the random numbers of elements `first` to `first` + `count` to `noise`, uint16[>= count]."""
    at = 0 if shared else 2
    key_0, key_1 = keys[at], np.uint32(keys[at + 1] ^ np.uint32(np.uint32(stream) * _STREAM_STEP))
    fill16(key_0, key_1, first, count, scratch, noise)


@kernel
def uniform(noise, at):
    """Vector of numbers between 0 and 1 from 16 random bits."""
    return (convert(convert(load(noise, at, LANES), i32), f32) + _HALF) * _UNIT


# -- bytes ---------------------------------------------------------------------------------------------------


@kernel
def address(body):
    """Address of an array."""
    return np.uint64(body.ctypes.data)


@kernel
def write_scalar(body, at, value):
    """Write a float32 to bytes."""
    array_at(np.uint64(body.ctypes.data + at), 1, f32)[0] = value


@kernel
def read_scalar(body, at):
    """Read a float32 from bytes."""
    return array_at(np.uint64(body.ctypes.data + at), 1, f32)[0]


@kernel
def write_length(body, at, count):
    """Write the length of lists to bytes."""
    array_at(np.uint64(body.ctypes.data + at), 1, u32)[0] = count


@kernel
def read_length(body, at):
    """Read the length of lists from bytes."""
    return np.int64(array_at(np.uint64(body.ctypes.data + at), 1, u32)[0])


@kernel
def packed_bytes(count, per_byte):
    """Bytes of `count` elements."""
    return (count + per_byte - 1) // per_byte


@kernel
def pack_planes(levels, count, bits, out, at):
    """Pack `count` levels, uint8 below 2^bits, CHUNK at a time; return where the next ones begin."""
    per = 8 // bits
    for start in range(0, count, CHUNK):
        length = min(CHUNK, count - start)
        size = (length + per - 1) // per
        levels[start + length : start + per * size] = 0
        for j in range(0, size, LANES):
            packed = load(levels, start + j, LANES)
            for plane in range(1, per):
                packed = packed | (load(levels, start + plane * size + j, LANES) << (plane * bits))
            store_until(out, at + j, at + size, packed)
        at += size
    return at


@kernel
def unpack_planes(packed, at, count, bits, levels):
    """Undo `pack_planes` for what begins at byte `at`; return where the next ones begin."""
    per, mask = 8 // bits, (1 << bits) - 1
    for start in range(0, count, CHUNK):
        size = (min(CHUNK, count - start) + per - 1) // per
        for j in range(0, size, LANES):
            bytes_ = load(packed, at + j, LANES)
            for plane in range(per):
                first = start + plane * size
                store_until(levels, first + j, first + size, (bytes_ >> (plane * bits)) & mask)
        at += size
    return at


@kernel
def pack_digits(levels, count, out, at):
    """Pack `count` digits 0, 1, 2 of a chunk, five a byte; return where the next chunk begins."""
    size = (count + 4) // 5
    levels[count : 5 * size] = 1
    for j in range(0, size, LANES):
        packed = load(levels, j, LANES)
        for plane in range(1, 5):
            packed = packed * 3 + load(levels, plane * size + j, LANES)
        store_until(out, at + j, at + size, packed)
    return at + size


@kernel
def unpack_digits(packed, at, count, levels):
    """Undo `pack_digits`; return where the next chunk begins, or -1 if a byte is not five digits."""
    size = (count + 4) // 5
    largest = splat(np.uint8(0), LANES)
    for j in range(0, size, LANES):
        bytes_ = load(packed, at + j, LANES)
        largest = maximum(largest, select(lanes_below(size - j, LANES), bytes_, largest))
        fraction = convert((convert(bytes_, u32) * 8631 + 8100) >> 13, u8)
        one, two = splat(np.uint8(1), LANES), splat(np.uint8(2), LANES)
        for plane in range(5):
            digit = select(fraction >= 171, two, select(fraction >= 86, one, splat(np.uint8(0), LANES)))
            store_until(levels, plane * size + j, (plane + 1) * size, digit)
            fraction = fraction * 3
    return at + size if largest_lane(largest) < 243 else -1


@kernel
def pack_bits(levels, count, out, at):
    """Pack `count` levels 0 or 1 of a chunk in the order of elements; return where the next chunk begins."""
    size = (count + 7) // 8
    levels[count : 8 * size] = 0
    for j in range(0, 8 * size, LANES):
        store_until(out, at + (j >> 3), at + size, as_bytes(mask_bits(load(levels, j, LANES) != 0)))
    return at + size


@kernel
def unpack_bits(packed, at, count, levels):
    """Undo `pack_bits`; return where the next chunk begins."""
    one, zero = splat(np.uint8(1), LANES), splat(np.uint8(0), LANES)
    for j in range(0, count, LANES):
        bits = bits_mask(from_bytes(load(packed, at + (j >> 3), 8)))
        store(levels, j, select(bits, one, zero))
    return at + (count + 7) // 8


# -- lists ---------------------------------------------------------------------------------------------------


@inlined
def append(mask, i, values, scratch, index, value, count, capacity):
    """Append the chosen lanes and their positions to a list; return its length, at most `capacity`.

    The arrays have space for `capacity` + SLOTS items.
    """
    chosen = mask_bits(mask)
    store(scratch, 0, values)
    num_chosen = popcount(chosen)
    if count + num_chosen > capacity:
        while chosen != 0 and count < capacity:
            lane = trailing_zeros(chosen)
            index[count], value[count] = i + lane, scratch[lane]
            count += 1
            chosen &= chosen - np.uint64(1)
        return count
    # No branch for vectors without any. Measured: it would cost a fifth of the sweep if one element in 100 is chosen.
    for first in range(count, count + max(num_chosen, 1), SLOTS):
        for slot in range(first, first + SLOTS):
            lane = trailing_zeros(chosen)
            index[slot], value[slot] = i + lane, scratch[lane]
            chosen &= chosen - np.uint64(1)
    return count + num_chosen


@kernel
def sample_positions(keys, count, size):
    """Positions of samples from `count` equal parts of `size` elements; part j begins at j * size // count."""
    words, places = draw_words(keys, count), np.empty(count, np.int64)
    if count == 0:
        return places
    whole, rest = size // count, size % count
    start, over = np.int64(0), np.int64(0)  # over / count has been lost by rounding
    for j in range(count):
        over += rest
        carry = np.int64(over >= count)
        width = whole + carry
        over -= carry * count
        places[j] = start + np.int64((np.uint64(words[j]) * np.uint64(max(width, 1))) >> np.uint64(32))
        start += width
    return places


@kernel
def draw_words(keys, count):
    """At least `count` random 32-bit words, from a separate stream of the private key."""
    key_1 = np.uint32(keys[3] ^ np.uint32(0x2545F491))
    num_groups = (count + RANDOM32_GROUP - 1) // RANDOM32_GROUP
    words = np.empty(num_groups * RANDOM32_GROUP, np.uint32)
    for group in range(num_groups):
        fill_group32(keys[2], key_1, group, words, group * RANDOM32_GROUP)
    return words


@kernel
def sort_floats(values, descending):
    """Sort in place: radix sort of integer keys in the order of the floats."""
    size = values.size
    keys, other = np.empty(size, np.uint32), np.empty(size, np.uint32)
    bits = array_at(np.uint64(values.ctypes.data), size, u32)
    for i in range(size):
        word = bits[i]
        keys[i] = word ^ (np.uint32(0xFFFFFFFF) if word >> np.uint32(31) else np.uint32(0x80000000))
    width = 8 if size < 8192 else 16  # bits per pass; a pass over few keys is faster than clearing 65,536 counts
    digits = np.uint32((1 << width) - 1)
    counts = np.empty(1 << width, np.int64)
    for at in range(0, 32, width):
        shift = np.uint32(at)
        counts[:] = 0
        for i in range(size):
            counts[(keys[i] >> shift) & digits] += 1
        total = 0
        for b in range(counts.size):
            length = counts[b]
            counts[b] = total
            total += length
        for i in range(size):
            digit = (keys[i] >> shift) & digits
            other[counts[digit]] = keys[i]
            counts[digit] += 1
        keys, other = other, keys
    for i in range(size):
        key = keys[size - 1 - i] if descending else keys[i]
        bits[i] = key ^ (np.uint32(0x80000000) if key >> np.uint32(31) else np.uint32(0xFFFFFFFF))


@kernel
def item(values, count, position):
    """The item at a position, which is clamped to the list; 0 if the list is empty."""
    if count == 0:
        return 0.0
    return np.float64(values[np.int64(min(max(position, 0.0), count - 1.0))])


@kernel
def keep_top(index, value, count, most):
    """Keep the `most` largest magnitudes of a list, in order; ties go to the first. Return the new length."""
    if count <= most:
        return count
    if most == 0:
        return 0
    bits = array_at(np.uint64(value.ctypes.data), count, u32)
    least, num_ties = kth_magnitude(bits, most)
    kept = 0
    for i in range(count):
        word = bits[i] & np.uint32(0x7FFFFFFF)
        is_tie = word == least
        stays = word > least or (is_tie and num_ties > 0)
        num_ties -= is_tie
        index[kept], value[kept] = index[i], value[i]
        kept += stays
    return kept


@kernel
def kth_magnitude(bits, k):
    """The k-th largest magnitude, as bits, and how many of that magnitude are among the k. Reads a digit per sweep."""
    found, known, counts = np.uint32(0), np.uint32(0), np.empty(1 << 11, np.int64)
    for shift, width in ((np.uint32(20), np.uint32(11)), (np.uint32(10), np.uint32(10)), (np.uint32(0), np.uint32(10))):
        digits = np.uint32((1 << width) - 1)
        counts[:] = 0
        for i in range(bits.size):
            word = bits[i] & np.uint32(0x7FFFFFFF)
            counts[(word >> shift) & digits] += (word & known) == found
        digit = np.int64(digits)
        while counts[digit] < k:
            k -= counts[digit]
            digit -= 1
        found |= np.uint32(digit) << shift
        known |= digits << shift
    return found, k


@kernel
def list_room(num_ranks):
    """Arrays for the lists of all ranks: addresses of positions, addresses of values, lengths."""
    return np.empty(num_ranks, np.uint64), np.empty(num_ranks, np.uint64), np.empty(num_ranks, np.int64)


@kernel
def add_at(index, values, sign, out):
    """Add sign * values to `out` at these positions; return False if one is outside. Negative zeros count as zero."""
    for j in range(index.size):
        if index[j] >= out.size:
            return False
        out[index[j]] += sign * (values[j] + np.float32(0))
    return True


__all__ = [name for name in dir() if not name.startswith("_")]
