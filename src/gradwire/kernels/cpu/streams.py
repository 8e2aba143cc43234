"""Streams of prefix code words: inner loops of `floats`.

Each step of a stream waits for the step before, so one loop writes or reads four streams. The reader gets up to six
symbols from each lookup and makes five lookups in each word that it loads. Only escapes and the ends of streams are
read symbol by symbol.
"""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu.compile import inlined, kernel
from gradwire.kernels.cpu.words import peek, poke
from gradwire.kernels.float_format import CHUNK, HEAD_BYTES, STREAMS
from gradwire.kernels.prefix_code import ESCAPE, MAX_LENGTH, MAX_SYMBOLS_A_LOOKUP, MAX_WORD_BITS, RAW_BITS

GROUP = 4
SHARE = CHUNK // STREAMS

# Buffers of a stream for the writer (bytes) and the reader (symbols): both write whole words past the end.
BUFFER_BYTES = (SHARE * MAX_WORD_BITS + 7) // 8 + 16
_LOOKUPS = 5  # of 11 bits each in 57 bits, the least that is left of a word at any bit
_MOST_SYMBOLS = _LOOKUPS * MAX_SYMBOLS_A_LOOKUP
STRIDE = SHARE + 64

_U0, _U1, _U3, _U7, _U8 = (np.uint64(value) for value in (0, 1, 3, 7, 8))
_U48, _U56, _BYTE = (np.uint64(value) for value in (48, 56, 255))
_WORD = np.uint32(0xFFFFFF)
_WINDOW = np.uint64((1 << MAX_LENGTH) - 1)
_U_RAW, _U_ESCAPE = np.uint64(RAW_BITS), np.uint64(ESCAPE)


# -- writing ---------------------------------------------------------------------------------------------------


@inlined
def _put(word, held, used):
    """Append a code word to the `used` bits of `held`."""
    return held | (np.uint64(word & _WORD) << used), used + np.uint64(word >> np.uint32(24))


@inlined
def _put_two(symbols, i, words, out, at, held, used):
    """Append the words of two symbols and write all full bytes. With seven bits left over they are under 64 bits."""
    held, used = _put(words[symbols[i]], held, used)
    held, used = _put(words[symbols[i + _U1]], held, used)
    poke(out, at, held)
    full = used >> _U3
    return at + full, held >> (full << _U3), used & _U7


@inlined
def _put_rest(symbols, i, end, words, out, start, at, held, used):
    """Append the words of the remaining symbols; return the bits of the stream."""
    while i < end:
        held, used = _put(words[symbols[i]], held, used)
        poke(out, at, held)
        full = used >> _U3
        at, held, used = at + full, held >> (full << _U3), used & _U7
        i += _U1
    return ((at - start) << _U3) + used


@kernel
def write_streams(symbols, size, words, out, lengths):
    """Write `size` symbols, uint16, as eight streams into `out`, and the bits of each to `lengths`, int64[8]."""
    size_, share = np.uint64(size), np.uint64((size + STREAMS - 1) // STREAMS)
    pitch = np.uint64(BUFFER_BYTES)
    for first in range(0, STREAMS, GROUP):
        s0 = np.uint64(first)
        i0, i1, i2, i3 = s0 * share, (s0 + _U1) * share, (s0 + np.uint64(2)) * share, (s0 + _U3) * share
        b0, b1, b2, b3 = s0 * pitch, (s0 + _U1) * pitch, (s0 + np.uint64(2)) * pitch, (s0 + _U3) * pitch
        a0, a1, a2, a3 = b0, b1, b2, b3
        h0 = h1 = h2 = h3 = _U0
        u0 = u1 = u2 = u3 = _U0
        shortest = size_ - i3 if i3 < size_ else _U0
        for _ in range(min(share, shortest) >> _U1):
            a0, h0, u0 = _put_two(symbols, i0, words, out, a0, h0, u0)
            a1, h1, u1 = _put_two(symbols, i1, words, out, a1, h1, u1)
            a2, h2, u2 = _put_two(symbols, i2, words, out, a2, h2, u2)
            a3, h3, u3 = _put_two(symbols, i3, words, out, a3, h3, u3)
            i0, i1, i2, i3 = i0 + np.uint64(2), i1 + np.uint64(2), i2 + np.uint64(2), i3 + np.uint64(2)
        e0 = (s0 + _U1) * share
        lengths[first] = _put_rest(symbols, i0, min(e0, size_), words, out, b0, a0, h0, u0)
        lengths[first + 1] = _put_rest(symbols, i1, min(e0 + share, size_), words, out, b1, a1, h1, u1)
        lengths[first + 2] = _put_rest(symbols, i2, min(e0 + share + share, size_), words, out, b2, a2, h2, u2)
        lengths[first + 3] = _put_rest(symbols, i3, min(e0 + share + share + share, size_), words, out, b3, a3, h3, u3)


@kernel
def measure_streams(symbols, size, words, lengths):
    """Write the bits of the eight streams to `lengths`, without writing the streams."""
    share = (size + STREAMS - 1) // STREAMS
    for stream in range(STREAMS):
        bits = np.uint32(0)
        for i in range(stream * share, min(size, (stream + 1) * share)):
            bits += words[symbols[i]] >> np.uint32(24)
        lengths[stream] = bits


@kernel
def streams_bytes(lengths):
    """Bytes of a chunk's head and streams."""
    total = HEAD_BYTES
    for stream in range(STREAMS):
        total += (lengths[stream] + 7) >> 3
    return total


@kernel
def copy_streams(mean, buffers, lengths, out, at):
    """Write the head of a chunk and its streams to out[at:]; return where they end."""
    out[at] = np.uint8(mean)
    for stream in range(STREAMS):
        out[at + 1 + 2 * stream] = np.uint8(lengths[stream] & 0xFF)
        out[at + 2 + 2 * stream] = np.uint8(lengths[stream] >> 8)
    at += HEAD_BYTES
    for stream in range(STREAMS):
        count, start = (lengths[stream] + 7) >> 3, stream * BUFFER_BYTES
        for i in range(count):
            out[at + i] = buffers[start + i]
        at += count
    return at


# -- reading ---------------------------------------------------------------------------------------------------


@inlined
def _step(window, lookup, symbols, at, bit):
    """The symbols of one lookup. All six bytes are written; those that are no symbols are overwritten later."""
    entry = lookup[window & _WINDOW]
    poke(symbols, at, entry)
    used = entry >> _U56
    return window >> used, at + ((entry >> _U48) & _BYTE), bit + used, entry


@inlined
def _take(body, lookup, symbols, at, bit):
    """Five lookups. The last entry is 0 if there is an escape."""
    window = peek(body, bit >> _U3) >> (bit & _U7)
    window, at, bit, entry = _step(window, lookup, symbols, at, bit)
    window, at, bit, entry = _step(window, lookup, symbols, at, bit)
    window, at, bit, entry = _step(window, lookup, symbols, at, bit)
    window, at, bit, entry = _step(window, lookup, symbols, at, bit)
    window, at, bit, entry = _step(window, lookup, symbols, at, bit)
    return at, bit, entry


@inlined
def peek_safely(body, at):
    """`peek` with zeros past the end."""
    size = np.uint64(body.size)
    if at + _U8 <= size:
        return peek(body, at)
    word, shift = _U0, _U0
    while at < size:
        word |= np.uint64(body[at]) << shift
        at, shift = at + _U1, shift + _U8
    return word


@kernel
def _take_escaped(body, bit, lengths, symbols, at, specials, count):
    """Read one symbol after an escape.

    Returns the bit after it, or 0 if the symbol should have used its own word, and the number of specials.
    """
    window = (peek_safely(body, bit >> _U3) >> (bit & _U7)) >> np.uint64(lengths[_U_ESCAPE])
    symbol = window & _BYTE
    symbols[at] = np.uint8(symbol)
    if symbol == _U0:
        specials[count] = at
        count += 1
    elif lengths[symbol] != 0:
        return _U0, count
    return bit + np.uint64(lengths[_U_ESCAPE]) + _U_RAW, count


@kernel
def _read_rest(body, code, symbols, at, end, bit, stop, specials, count):
    """Read the rest of one stream and its padding; return the number of specials so far, or -1 if it is invalid."""
    lookup, lengths = code
    while at < end:
        if bit >= stop:
            return -1
        entry = lookup[(peek_safely(body, bit >> _U3) >> (bit & _U7)) & _WINDOW]
        found = (entry >> _U48) & _BYTE
        if found == _U0:
            bit, count = _take_escaped(body, bit, lengths, symbols, at, specials, count)
            if bit == _U0:
                return -1
            at += _U1
        elif at + found <= end:
            poke(symbols, at, entry)
            at, bit = at + found, bit + (entry >> _U56)
        else:
            symbols[at] = np.uint8(entry & _BYTE)
            at, bit = at + _U1, bit + np.uint64(lengths[entry & _BYTE])
    if bit != stop:
        return -1
    if (bit & _U7) != _U0 and (np.uint64(body[bit >> _U3]) >> (bit & _U7)) != _U0:
        return -1
    return count


@kernel
def _read_group(body, code, symbols, group, size, bits, stops, specials, count):
    """Read four streams; return the number of specials so far, or -1 if a stream is invalid.

    The symbols of stream s go to `symbols` from s · STRIDE on.
    """
    lookup, lengths = code
    first, share = np.uint64(group * GROUP), np.uint64((size + STREAMS - 1) // STREAMS)
    size_, pitch, two = np.uint64(size), np.uint64(STRIDE), np.uint64(2)
    o0, o1, o2, o3 = first * pitch, (first + _U1) * pitch, (first + two) * pitch, (first + _U3) * pitch
    e0 = o0 + (min(size_, (first + _U1) * share) - min(size_, first * share))
    e1 = o1 + (min(size_, (first + two) * share) - min(size_, (first + _U1) * share))
    e2 = o2 + (min(size_, (first + _U3) * share) - min(size_, (first + two) * share))
    e3 = o3 + (min(size_, (first + np.uint64(4)) * share) - min(size_, (first + _U3) * share))
    b0, b1, b2, b3 = bits[first], bits[first + _U1], bits[first + two], bits[first + _U3]
    most = np.uint64(_MOST_SYMBOLS)
    # The fourth stream ends last: up to its end, whole words can be read from all four.
    last = stops[first + _U3]
    readable = np.uint64(max(0, body.size - 16) * 8)
    if last > readable:
        last = readable
    while (
        o0 + most <= e0 and o1 + most <= e1 and o2 + most <= e2 and o3 + most <= e3
        and b0 <= last and b1 <= last and b2 <= last and b3 <= last
    ):  # fmt: skip
        o0, b0, f0 = _take(body, lookup, symbols, o0, b0)
        o1, b1, f1 = _take(body, lookup, symbols, o1, b1)
        o2, b2, f2 = _take(body, lookup, symbols, o2, b2)
        o3, b3, f3 = _take(body, lookup, symbols, o3, b3)
        if f0 == _U0 or f1 == _U0 or f2 == _U0 or f3 == _U0:
            if f0 == _U0:
                b0, count = _take_escaped(body, b0, lengths, symbols, o0, specials, count)
                o0 += _U1
            if f1 == _U0:
                b1, count = _take_escaped(body, b1, lengths, symbols, o1, specials, count)
                o1 += _U1
            if f2 == _U0:
                b2, count = _take_escaped(body, b2, lengths, symbols, o2, specials, count)
                o2 += _U1
            if f3 == _U0:
                b3, count = _take_escaped(body, b3, lengths, symbols, o3, specials, count)
                o3 += _U1
            if b0 == _U0 or b1 == _U0 or b2 == _U0 or b3 == _U0:
                return -1
    count = _read_rest(body, code, symbols, o0, e0, b0, stops[first], specials, count)
    if count >= 0:
        count = _read_rest(body, code, symbols, o1, e1, b1, stops[first + _U1], specials, count)
    if count >= 0:
        count = _read_rest(body, code, symbols, o2, e2, b2, stops[first + two], specials, count)
    if count >= 0:
        count = _read_rest(body, code, symbols, o3, e3, b3, stops[first + _U3], specials, count)
    return count


@kernel
def read_streams(body, at, end, size, lookup, lengths, symbols, specials):
    """Read the eight streams of a chunk of `size` symbols in body[at:end].

    Returns where they end and the number of `specials` filled in, the positions of zeros that came after an escape; or
    (-1, 0) if a stream is invalid.
    """
    if end - at < HEAD_BYTES:
        return -1, 0
    bits, stops = np.empty(STREAMS, np.uint64), np.empty(STREAMS, np.uint64)
    start = at + HEAD_BYTES
    for stream in range(STREAMS):
        length = np.int64(body[at + 1 + 2 * stream]) | (np.int64(body[at + 2 + 2 * stream]) << 8)
        bits[stream], stops[stream] = 8 * start, 8 * start + length
        start += (length + 7) >> 3
    if start > end:
        return -1, 0
    code = (lookup, lengths)
    count = 0
    for group in range(STREAMS // GROUP):
        count = _read_group(body, code, symbols, group, size, bits, stops, specials, count)
        if count < 0:
            return -1, 0
    return start, count
