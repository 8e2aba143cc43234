"""Ascending positions in few bits. Mirrors `reference.positions`, where the format and the contracts stand."""
# Shapes: N = elements, K = positions, B = blocks

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import as_writable
from gradwire.kernels.cpu.lanes import trailing_zeros
from gradwire.kernels.cpu.vector import array_at, u32, u64
from gradwire.kernels.layout import expect_size
from gradwire.kernels.reference.positions import BITMAP, MOST_LOW_BITS

_ONE, _WORD = np.uint64(1), np.uint64(0xFFFFFFFF)


@kernel
def _num_bytes(bits):
    return (bits + 7) >> 3


@kernel
def _num_upper(size, count, low):
    """Bits of the bit string, or of the bitmap."""
    return size if low == BITMAP else count + ((size + (np.int64(1) << low) - 1) >> low)


@kernel
def _low_bits(size, count):
    best, fewest = np.int64(BITMAP), _num_bytes(size)
    for low in range(np.int64(1), np.int64(MOST_LOW_BITS + 1)):
        found = _num_bytes(_num_upper(size, count, low)) + _num_bytes(count * low)
        if found < fewest:
            best, fewest = low, found
    return best


@kernel
def coded_bytes(size, count):
    """Compiled `positions_bytes`, for callers that are compiled themselves."""
    if count == 0:
        return np.int64(0)
    low = _low_bits(size, count)
    lower = np.int64(0) if low == BITMAP else _num_bytes(count * low)
    return _num_bytes(_num_upper(size, count, low)) + lower


@kernel
def _put(out, word, value):
    """Write 32 bits as word number `word` of bytes, or those of its bytes that there are."""
    at = 4 * word
    if at + 4 <= out.size:
        array_at(np.uint64(out.ctypes.data) + np.uint64(at), 1, u32)[0] = value & _WORD
        return
    for byte in range(at, out.size):
        out[byte] = (value >> np.uint64(8 * (byte - at))) & np.uint64(0xFF)


@kernel
def _pack_ones(index, low, out):
    """The bit string or the bitmap: words are gathered in a register, each written once."""
    word, bits = np.int64(0), np.uint64(0)
    for j in range(index.size):
        place = np.int64(index[j]) if low == BITMAP else (np.int64(index[j]) >> low) + j
        while place >> 5 != word:
            _put(out, word, bits)
            word, bits = word + 1, np.uint64(0)
        bits |= _ONE << np.uint64(place & 31)
    while 4 * word < out.size:
        _put(out, word, bits)
        word, bits = word + 1, np.uint64(0)


@kernel
def _pack_low(index, low, out):
    mask = (_ONE << np.uint64(low)) - _ONE
    word, bits, filled = np.int64(0), np.uint64(0), np.int64(0)
    for j in range(index.size):
        value = np.uint64(index[j]) & mask
        if low > 32:
            bits |= (value & _WORD) << np.uint64(filled)
            _put(out, word, bits)
            word, bits = word + 1, bits >> np.uint64(32)
            value = value >> np.uint64(32)
            bits |= value << np.uint64(filled)
            filled += low - 32
        else:
            bits |= value << np.uint64(filled)
            filled += low
        if filled >= 32:
            _put(out, word, bits)
            word, bits, filled = word + 1, bits >> np.uint64(32), filled - 32
    if filled:
        _put(out, word, bits)


@kernel
def write_positions(index, size, out):
    """Compiled `pack_positions`: `out` holds `coded_bytes` bytes."""
    count = np.int64(index.size)
    if count == 0:
        return
    low = _low_bits(np.int64(size), count)
    num_upper = _num_bytes(_num_upper(np.int64(size), count, low))
    _pack_ones(index, low, out[:num_upper])
    if low != BITMAP:
        _pack_low(index, low, out[num_upper:])


@kernel
def _word_at(packed, at):
    """The 64 bits from byte `at` on; zeros past the end."""
    if at + 8 <= packed.size:
        return array_at(np.uint64(packed.ctypes.data) + np.uint64(at), 1, u64)[0]
    bits = np.uint64(0)
    for byte in range(at, packed.size):
        bits |= np.uint64(packed[byte]) << np.uint64(8 * (byte - at))
    return bits


@kernel
def _bits_at(packed, at, low):
    """`low` bits, 40 at most, from bit number `at` on."""
    return (_word_at(packed, at >> 3) >> np.uint64(at & 7)) & ((_ONE << np.uint64(low)) - _ONE)


@kernel
def read_positions(packed, size, index):
    """Compiled `unpack_positions`; writes to nothing but `index`, whatever the bytes are."""
    count, size = np.int64(index.size), np.int64(size)
    if count > size or packed.size != coded_bytes(size, count):
        return False
    if count == 0:
        return True
    low = _low_bits(size, count)
    num_upper = _num_bytes(_num_upper(size, count, low))
    upper, lower = packed[:num_upper], packed[num_upper:]
    if low != BITMAP and _bits_at(lower, count * low, np.int64(8 * lower.size - count * low)) != 0:
        return False
    found, last = np.int64(0), np.int64(-1)
    for start in range(0, num_upper, 8):
        bits = _word_at(upper, start)
        while bits != 0:
            if found == count:
                return False
            place = np.int64(8 * start) + trailing_zeros(bits)
            bits &= bits - _ONE
            if low != BITMAP:
                place = (place - found) << low | np.int64(_bits_at(lower, found * low, low))
            if place <= last or place >= size:
                return False
            index[found] = place
            last = place
            found += 1
    return found == count


def positions_bytes(size: int, count: int) -> int:
    return int(coded_bytes(size, count))


def pack_positions(index: np.ndarray, size: int, out: np.ndarray) -> None:
    expect_size("pack_positions", "out", out, positions_bytes(size, index.size))
    write_positions(as_writable(index), size, out)


def unpack_positions(packed: np.ndarray, size: int, index: np.ndarray) -> bool:
    return bool(read_positions(as_writable(packed), size, index))
