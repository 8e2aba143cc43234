"""Ascending positions in few bits. Contracts: `reference.positions`."""
# Shapes: N = elements, K = positions, B = blocks

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import as_writable
from gradwire.kernels.cpu.lanes import trailing_zeros
from gradwire.kernels.cpu.vector import array_at, u8, u32, u64
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
    """`positions_bytes` for compiled callers."""
    if count == 0:
        return np.int64(0)
    low = _low_bits(size, count)
    lower = np.int64(0) if low == BITMAP else _num_bytes(count * low)
    return _num_bytes(_num_upper(size, count, low)) + lower


# Functions called in loops take addresses, because passing an array counts references each time. The last word has
# functions of its own, so that those for all other words are small enough to be inlined: twice as fast.


@kernel
def _put_last(place, num_bytes, at, value):
    out = array_at(place, num_bytes, u8)
    for byte in range(at, num_bytes):
        out[byte] = (value >> np.uint64(8 * (byte - at))) & np.uint64(0xFF)


@kernel
def _put(place, num_bytes, word, value):
    """Write 32 bits as word number `word` of the bytes at an address; past their end nothing is written."""
    at = 4 * word
    if at + 4 <= num_bytes:
        array_at(place + np.uint64(at), 1, u32)[0] = value & _WORD
    else:
        _put_last(place, num_bytes, at, value)


@kernel
def _pack_ones(index, low, place, num_bytes):
    """Write the bit string or the bitmap, each word once."""
    word, bits = np.int64(0), np.uint64(0)
    for j in range(index.size):
        at = np.int64(index[j]) if low == BITMAP else (np.int64(index[j]) >> low) + j
        while at >> 5 != word:
            _put(place, num_bytes, word, bits)
            word, bits = word + 1, np.uint64(0)
        bits |= _ONE << np.uint64(at & 31)
    while 4 * word < num_bytes:
        _put(place, num_bytes, word, bits)
        word, bits = word + 1, np.uint64(0)


@kernel
def _pack_low(index, low, place, num_bytes):
    mask = (_ONE << np.uint64(low)) - _ONE
    word, bits, filled = np.int64(0), np.uint64(0), np.int64(0)
    for j in range(index.size):
        value, width = np.uint64(index[j]) & mask, low
        if low > 32:
            bits |= (value & _WORD) << np.uint64(filled)
            _put(place, num_bytes, word, bits)
            word, bits, value, width = word + 1, bits >> np.uint64(32), value >> np.uint64(32), low - 32
        bits |= value << np.uint64(filled)
        filled += width
        if filled >= 32:
            _put(place, num_bytes, word, bits)
            word, bits, filled = word + 1, bits >> np.uint64(32), filled - 32
    if filled:
        _put(place, num_bytes, word, bits)


@kernel
def write_positions(index, size, out):
    """`pack_positions` for compiled callers; `out` holds `coded_bytes` bytes."""
    count = np.int64(index.size)
    if count == 0:
        return
    low = _low_bits(np.int64(size), count)
    num_upper = _num_bytes(_num_upper(np.int64(size), count, low))
    place = np.uint64(out.ctypes.data)
    _pack_ones(index, low, place, num_upper)
    if low != BITMAP:
        _pack_low(index, low, place + np.uint64(num_upper), np.int64(out.size) - num_upper)


@kernel
def _last_word(place, num_bytes, at):
    packed, bits = array_at(place, num_bytes, u8), np.uint64(0)
    for byte in range(at, num_bytes):
        bits |= np.uint64(packed[byte]) << np.uint64(8 * (byte - at))
    return bits


@kernel
def _word_at(place, num_bytes, at):
    """64 bits from byte `at` of the bytes at an address; zeros past their end."""
    if at + 8 <= num_bytes:
        return array_at(place + np.uint64(at), 1, u64)[0]
    return _last_word(place, num_bytes, at)


@kernel
def _bits_at(place, num_bytes, at, low):
    """`low` bits, at most 40, from bit number `at` on."""
    return (_word_at(place, num_bytes, at >> 3) >> np.uint64(at & 7)) & ((_ONE << np.uint64(low)) - _ONE)


@kernel
def read_positions(packed, size, index):
    """`unpack_positions` for compiled callers. Writes only to `index`, whatever the bytes are."""
    count, size = np.int64(index.size), np.int64(size)
    if count > size or packed.size != coded_bytes(size, count):
        return False
    if count == 0:
        return True
    low = _low_bits(size, count)
    num_upper = _num_bytes(_num_upper(size, count, low))
    upper, num_lower = np.uint64(packed.ctypes.data), np.int64(packed.size) - num_upper
    lower = upper + np.uint64(num_upper)
    if low != BITMAP and _bits_at(lower, num_lower, count * low, 8 * num_lower - count * low) != 0:
        return False
    found, last = np.int64(0), np.int64(-1)
    for start in range(np.int64(0), num_upper, np.int64(8)):
        bits = _word_at(upper, num_upper, start)
        while bits != 0:
            if found == count:
                return False
            at = 8 * start + trailing_zeros(bits)
            bits &= bits - _ONE
            if low != BITMAP:
                at = (at - found) << low | np.int64(_bits_at(lower, num_lower, found * low, low))
            if at <= last or at >= size:
                return False
            index[found] = at
            last = at
            found += 1
    return found == count


def positions_bytes(size: int, count: int) -> int:
    return int(coded_bytes(size, count))


def pack_positions(index: np.ndarray, size: int, out: np.ndarray) -> None:
    expect_size("pack_positions", "out", out, positions_bytes(size, index.size))
    write_positions(as_writable(index), size, out)


def unpack_positions(packed: np.ndarray, size: int, index: np.ndarray) -> bool:
    return bool(read_positions(as_writable(packed), size, index))
