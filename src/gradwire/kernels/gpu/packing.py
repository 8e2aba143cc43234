"""Device functions called by generated Triton code: packed arrays and lists.

The formats are those of `gradwire.lang.types`. A program packs a full chunk at once. An array may end with a partial
chunk, whose planes are shorter; it is stored in `tail`, and `pack_tail` packs it.
"""
# Shapes: S = bytes of a chunk

import triton
import triton.language as tl

from gradwire.kernels.gpu.device import load_elements, raise_flag, watch_for_nonfinite


@triton.jit
def store_bits(out, start, n, mask):
    """Pack the conditions of a chunk, eight per byte, in the order of elements."""
    bits = tl.reshape(mask.to(tl.int32), [128, 8]) << tl.arange(0, 8)[None, :]
    j = tl.arange(0, 128)
    tl.store(out + start // 8 + j, tl.sum(bits, axis=1).to(tl.uint8), mask=start + 8 * j < n)


@triton.jit
def before_tail_end(start, size, j, n):
    """Mask of the elements from `start` on that belong to the partial chunk of an array; all false in full chunks."""
    end = start + size + tl.zeros_like(j)  # a vector, as the interpreter broadcasts no conditions
    return (start + j < n) & (end > n)


@triton.jit
def store_planes(out, tail, start, n, levels, bits: tl.constexpr):
    """Pack the levels of a chunk in planes; the levels of a partial chunk go to `tail`."""
    per: tl.constexpr = 8 // bits
    width: tl.constexpr = 1024 // per
    planes = tl.reshape(levels.to(tl.int32), [per, width]) << (bits * tl.arange(0, per)[:, None])
    packed = tl.sum(planes, axis=0).to(tl.uint8)
    end = start + 1024 + tl.zeros([width], tl.int64)
    tl.store(out + start // per + tl.arange(0, width), packed, mask=end <= n)
    j = tl.arange(0, 1024)
    tl.store(tail + j, levels.to(tl.int32).to(tl.uint8), mask=before_tail_end(start, 1024, j, n))


@triton.jit
def store_tail(tail, start, i, n, digits):
    """Store the digits of a partial chunk of 5,120."""
    tl.store(tail + (i - start), digits.to(tl.uint8), mask=before_tail_end(start, 5120, i - start, n))


@triton.jit
def store_digits(out, start, n, packed):
    """Store the bytes of a chunk of 5,120 trits, if it is full."""
    j = tl.arange(0, 1024)
    end = start + 5120 + tl.zeros([1024], tl.int64)
    tl.store(out + start // 5 + j, packed.to(tl.uint8), mask=end <= n)


@triton.jit
def pack_tail(tail, out, count, size, per: tl.constexpr, base: tl.constexpr, padding: tl.constexpr):
    """Kernel: pack the `count` levels of a partial chunk into `size` bytes."""
    j = tl.arange(0, 1024)
    packed = tl.zeros([1024], tl.int32)
    for k in tl.static_range(per):
        plane = k if base == 3 else per - 1 - k  # the first plane of trits is the most significant digit
        at = plane * size + j
        packed = packed * base + tl.load(tail + at, mask=(j < size) & (at < count), other=padding).to(tl.int32)
    tl.store(out + j, packed.to(tl.uint8), mask=j < size)


@triton.jit
def load_bits(packed, i, inside):
    """Elements of one bit, as floats."""
    byte = tl.load(packed + i // 8, mask=inside, other=0).to(tl.int32)
    return ((byte >> (i % 8).to(tl.int32)) & 1).to(tl.float32)


@triton.jit
def load_planes(packed, i, n, inside, bits: tl.constexpr):
    """Elements of a planar array, as floats."""
    per: tl.constexpr = 8 // bits
    start = i // 1024 * 1024
    size = (tl.maximum(tl.minimum(n - start, 1024), 1) + (per - 1)) // per
    byte = tl.load(packed + start // per + (i - start) % size, mask=inside, other=0).to(tl.int32)
    return ((byte >> ((i - start) // size * bits).to(tl.int32)) & ((1 << bits) - 1)).to(tl.float32)


@triton.jit
def load_digits(packed, i, n, inside, bad):
    """Trits, as floats. Sets the flag `bad` if a byte is not five digits."""
    start = i // 5120 * 5120
    size = (tl.maximum(tl.minimum(n - start, 5120), 1) + 4) // 5
    byte = tl.load(packed + start // 5 + (i - start) % size, mask=inside, other=0).to(tl.int32)
    raise_flag(bad, byte >= 243)
    plane = (i - start) // size
    power = tl.where(plane == 0, 81, tl.where(plane == 1, 27, tl.where(plane == 2, 9, tl.where(plane == 3, 3, 1))))
    return (byte // power % 3 - 1).to(tl.float32)


@triton.jit
def load_finite(source, i, inside, bad):
    """Floats from an untrusted payload. Sets the flag `bad` if one is not finite."""
    x = load_elements(source, i, inside)
    watch_for_nonfinite(bad, x)
    return x


# -- lists ---------------------------------------------------------------------------------------------------


@triton.jit
def store_chosen(index, value, starts, most, i, values, chosen):
    """Write the chosen values and their positions to the chunk's part of a list of at most `most` items."""
    lanes = chosen.to(tl.int32)
    at = tl.load(starts + tl.program_id(0)) + tl.cumsum(lanes, axis=0) - lanes
    tl.store(index + at, i.to(tl.int32), mask=chosen & (at < most))
    tl.store(value + at, values, mask=chosen & (at < most))


@triton.jit
def hash_slot(i, a, b, slots):
    """Slots of positions, as in `gradwire.kernels.reference.hashing`."""
    x = i.to(tl.uint64) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    x = x ^ (x >> 16)
    return (((x * a.to(tl.uint64) + b.to(tl.uint64)) >> 32) * slots) >> 32


@triton.jit
def store_hashed(table, numbers, slots, i, values, chosen):
    """Write the chosen elements to their slots. Each slot keeps the largest magnitude, the first of equal ones.

    An entry is the magnitude's 31 bits, the complement of the position and the sign, so that it is the maximum of all
    entries written to a slot, in any order. A table without slots stays empty.
    """
    slot = hash_slot(i, tl.load(numbers), tl.load(numbers + 1), slots)
    bits = values.to(tl.int32, bitcast=True).to(tl.int64)
    entry = (((bits & 0x7FFFFFFF) - 0x40000000) << 33) | ((0xFFFFFFFF - i.to(tl.int64)) << 1) | ((bits >> 31) & 1)
    tl.atomic_max(table + slot.to(tl.int64), entry, mask=chosen & (slot.to(tl.int64) < slots))


@triton.jit
def add_at(index, values, count, out, n, sign, bad):
    """Kernel: add sign · values to `out` at these positions; set `bad` if a position is outside.

    Encoders send no position twice. If one occurs twice, the order of additions is not fixed.
    """
    j = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    inside = j < count
    at = tl.load(index + j, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    raise_flag(bad, inside & (at >= n))
    value = tl.load(values + j, mask=inside, other=0.0)
    tl.atomic_add(out + at, sign * (value + 0.0), mask=inside & (at < n))
