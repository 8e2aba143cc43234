"""3LC and top-k for small tensors: each in one compiled function, for fusion groups.

They have the signatures of generated code and write the same bytes as the compressors' own methods, which are made for
large tensors and several threads.
"""
# Shapes: N elements, K kept elements, S = ceil(N/5) bytes, W = messages

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import INFINITY_BITS, LANES, MAGNITUDE, load_f32
from gradwire.kernels.cpu.lanes import bitcast, first_lane, splat
from gradwire.kernels.cpu.positions import coded_bytes, read_positions, write_positions
from gradwire.kernels.cpu.reduce import largest_bits
from gradwire.kernels.cpu.sweep import compensate_bits
from gradwire.kernels.cpu.ternary import pack_digits, pack_digits_residual, sum_digits
from gradwire.kernels.cpu.vector import array_at, f32, store, u8, u32
from gradwire.kernels.cpu.zero_run import expand_runs, shorten_runs
from gradwire.kernels.layout import ZERO_BYTE

_LARGEST = np.float64(np.finfo(np.float32).max)
_SMALLEST = np.finfo(np.float32).smallest_subnormal
_POWERS = np.array([81, 27, 9, 3, 1], np.int64)
_DIGIT, _NUM_DIGITS = 8, 256  # of a radix selection over 31 bits


@kernel
def _magnitude(bits):
    """The float32 with these bits, as float64."""
    return np.float64(first_lane(bitcast(splat(bits, 1), f32)))


@kernel
def _scaled(value, scale):
    """`compressors.base.array.scaled`: only zero becomes zero."""
    found = np.float32(np.float64(value) * np.float64(scale))
    if found == 0 and value != 0:
        return np.float32(np.copysign(_SMALLEST, value))
    return found


# -- 3LC -----------------------------------------------------------------------------------------------------


@kernel
def _half(M):
    """`kernels.layout.half_of`."""
    half = np.float32(np.float64(M) * 0.5)
    return np.nextafter(half, np.float32(0)) if np.float64(half) > np.float64(M) * 0.5 else half


@kernel
def _ternary_scale(largest, sparsity):
    M = np.float32(min(largest * sparsity, _LARGEST))
    return M if largest > _half(M) else np.float32(largest)


@kernel
def encode_ternary(grad, scale, residual_in, residual_out, body, stats, keys, first, static, scratch):
    """`ThreeLC.encode`. `static` holds the sparsity multiplier, and 1 if zero-run encoding follows."""
    if residual_out is None:
        bits = largest_bits(grad, 0, grad.size)
    else:
        bits = compensate_bits(grad, scale, residual_in, residual_out)
    if bits >= INFINITY_BITS:
        return -1
    M = _ternary_scale(_magnitude(bits), static[0])
    packed = body[4:]
    quartic = scratch[: packed.size] if static[1] != 0 else packed
    half = _half(M) if M > 0 else np.float32(np.inf)
    if residual_out is None:
        sent = _scaled(M, scale)
        if not np.isfinite(sent):
            return -1
        pack_digits(grad, half, quartic)
    else:
        sent = M
        pack_digits_residual(residual_out, half, M, quartic, residual_out)
    array_at(np.uint64(body.ctypes.data), 1, f32)[0] = sent
    return 4 + (shorten_runs(quartic, packed) if static[1] != 0 else packed.size)


@kernel
def _padding_is_zero(quartic, count):
    for element in range(count, 5 * quartic.size):
        if np.int64(quartic[element % quartic.size]) // _POWERS[element // quartic.size] % 3 != 1:
            return False
    return True


@kernel
def sum_ternary(bodies, sizes, out, stats, keys, first, static, scratch):
    """`ThreeLC.decode_sum`; `static` as for `encode_ternary`."""
    count, size = out.size, (out.size + 4) // 5
    quartics, scales = np.empty(bodies.size, np.uint64), np.empty(bodies.size, np.float32)
    for rank in range(bodies.size):
        if sizes[rank] < 4:
            return False
        scales[rank] = array_at(bodies[rank], 1, f32)[0]
        packed = array_at(bodies[rank] + np.uint64(4), sizes[rank] - 4, u8)
        if static[1] != 0:
            quartic = scratch[rank * size : (rank + 1) * size]
            if expand_runs(packed, quartic) != size:
                return False
        else:
            quartic = packed
            if packed.size != size:
                return False
        M = scales[rank]
        if not np.isfinite(M) or np.copysign(np.float32(1), M) < 0 or (M > 0) != (quartic != ZERO_BYTE).any():
            return False
        if not _padding_is_zero(quartic, count):
            return False
        quartics[rank] = np.uint64(quartic.ctypes.data)
    return sum_digits(quartics, scales, size, out)


# -- top-k ---------------------------------------------------------------------------------------------------


@kernel
def _kth_key(keys, k, candidates):
    """The k-th largest key, and how many keys equal to it are among the k largest. Overwrites `candidates`."""
    bins = np.empty(_NUM_DIGITS, np.int64)
    count, prefix = keys.size, np.uint32(0)
    for i in range(count):
        candidates[i] = keys[i] & np.uint32(MAGNITUDE)
    for shift in (np.uint32(24), np.uint32(16), np.uint32(8), np.uint32(0)):
        bins[:] = 0
        for i in range(count):
            bins[(candidates[i] >> shift) & np.uint32(_NUM_DIGITS - 1)] += 1
        digit = _NUM_DIGITS - 1
        while bins[digit] < k:
            k -= bins[digit]
            digit -= 1
        prefix |= np.uint32(digit) << shift
        kept = 0
        for i in range(count):
            candidate = candidates[i]
            candidates[kept] = candidate
            kept += (candidate >> shift) & np.uint32(_NUM_DIGITS - 1) == digit
        count = kept
    return prefix, k


@kernel
def encode_top_k(grad, scale, residual_in, residual_out, body, stats, keys, first, static, scratch):
    """`TopK.encode`. `static` holds K; `scratch` has space for two arrays of N and one of K numbers, 32 bits each."""
    size, k = grad.size, np.int64(static[0])
    place = np.uint64(scratch.ctypes.data)
    candidates = array_at(place, size, u32)
    index = array_at(place + np.uint64(4 * size), k, u32)
    if residual_out is None:
        x = array_at(place + np.uint64(4 * (size + k)), size, f32)
        for i in range(0, size, LANES):
            store(x, i, load_f32(grad, i, LANES))
    else:
        x = residual_out
        compensate_bits(grad, scale, residual_in, residual_out)
    words = array_at(np.uint64(x.ctypes.data), size, u32)
    least, num_ties = _kth_key(words, k, candidates)
    values = array_at(np.uint64(body.ctypes.data), k, f32)
    count = 0
    for i in range(size):
        key = words[i] & np.uint32(MAGNITUDE)
        if key < least or (key == least and num_ties == 0):
            continue
        num_ties -= key == least
        if key >= np.uint32(INFINITY_BITS):
            return -1
        index[count] = i
        if residual_out is None:
            values[count] = _scaled(x[i], scale)
        else:
            values[count] = x[i]
            x[i] = np.float32(0)
        count += 1
    num_bytes = coded_bytes(size, k)
    write_positions(index, size, body[4 * k : 4 * k + num_bytes])
    return 4 * k + num_bytes


@kernel
def _zeros_first(index, values):
    """Whether kept zeros have the lowest indices: the last of them must be as far as its position."""
    for j in range(values.size - 1, -1, -1):
        if values[j] == 0:
            return index[j] == j
    return True


@kernel
def sum_top_k(bodies, sizes, out, stats, keys, first, static, scratch):
    """`TopK.decode_sum`. `scratch` has space for K numbers of 32 bits."""
    k = np.int64(static[0])
    index = array_at(np.uint64(scratch.ctypes.data), k, u32)
    zero = splat(np.float32(0), LANES)
    for i in range(0, out.size, LANES):
        store(out, i, zero)
    for rank in range(bodies.size):
        if sizes[rank] < 4 * k:
            return False
        values = array_at(bodies[rank], k, f32)
        if not read_positions(array_at(bodies[rank] + np.uint64(4 * k), sizes[rank] - 4 * k, u8), out.size, index):
            return False
        if not _zeros_first(index, values):
            return False
        for j in range(k):
            if not np.isfinite(values[j]):
                return False
            out[index[j]] += values[j] + np.float32(0)
    return True
