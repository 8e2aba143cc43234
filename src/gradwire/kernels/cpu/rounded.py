"""Floats rounded to margins that both ends know. Contracts and layout: `reference.rounded`.

A chunk takes several sweeps: vectors find the kept bits of each element and their number, and a loop moves the bits.
When reading, the place of an element's bits follows from the widths of those before it, so the loop waits for no data.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np

from gradwire.kernels.cpu import floats, streams
from gradwire.kernels.cpu.chunk_counts import mean_of, symbols_of, turn_of
from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import LANES, as_writable
from gradwire.kernels.cpu.lanes import (
    bitcast,
    convert,
    convert_like,
    lanes_below,
    mask_bits,
    maximum,
    minimum,
    select,
    splat,
    sum_integers,
)
from gradwire.kernels.cpu.parallel import run_all, shares
from gradwire.kernels.cpu.stored import LEAST_CHUNKS, load_chunk, pack_in_parts, put_word, store_chunk
from gradwire.kernels.cpu.vector import i32, load, store, u8, u32
from gradwire.kernels.cpu.words import peek, poke
from gradwire.kernels.float_format import (
    CHUNK,
    FLAT,
    FORM_SHIFT,
    LEVELS,
    SIZE_MASK,
    STORED,
    STREAMS,
    TABLE_BYTES,
    FloatFormat,
    as_bits,
    format_of,
)
from gradwire.kernels.layout import expect_room, expect_size
from gradwire.kernels.prefix_code import PrefixCode

_U1, _U3, _U7, _U8 = (np.uint64(value) for value in (1, 3, 7, 8))
_LARGEST = np.finfo(np.float32).max
_MOST_BYTES = 3 * CHUNK + 16  # of a chunk's signs and mantissas, and what the last word writes beyond them


class _Scratch(threading.local):
    """Scratch memory of a thread for one chunk, kept between calls."""

    def __init__(self) -> None:
        num_symbols = STREAMS * streams.STRIDE
        self.packing = (
            np.empty(CHUNK, np.uint16),  # symbols
            np.empty(CHUNK, np.uint32),  # kept bits of the elements
            np.empty(CHUNK, np.uint8),  # their widths
            np.empty(STREAMS * streams.BUFFER_BYTES, np.uint8),
            np.empty(_MOST_BYTES, np.uint8),
        )
        self.unpacking = (
            np.empty(num_symbols, np.uint8),  # symbols
            np.empty(num_symbols, np.uint8),  # whether they are kept
            np.empty(CHUNK, np.uint32),  # exponents
            np.empty(CHUNK, np.uint32),  # kept bits
            np.empty(CHUNK, np.uint8),  # widths
            np.empty(CHUNK, np.uint64),  # positions of zeros after an escape
            np.empty(CHUNK, np.uint16),  # symbols, to measure how long a chunk would be
        )


_scratch = _Scratch()


# -- margins and rounding --------------------------------------------------------------------------------------


@kernel
def _margins(limits, inverse, out):
    zeros, largest = splat(np.uint32(0), LANES), splat(_LARGEST, LANES)
    for i in range(0, limits.size, LANES):
        limit = load(limits, i, LANES)
        quotients = select(limit > _LARGEST, largest, limit) * inverse
        found = (bitcast(quotients, u32) >> 23) & 0xFF
        store(out, i, convert(select(quotients > 0, found, zeros), u8))


def margins_of(limits: np.ndarray, guard: float, out: np.ndarray) -> None:
    expect_size("margins_of", "out", out, limits.size)
    _margins(as_writable(limits), np.float32(1 / guard), out)


@kernel
def _lost(exponents, margins, form, bias, most):
    """Number of bits that each element loses, from vectors of biased exponents, uint32, and of margins, uint8."""
    zeros, ones = splat(np.int32(0), LANES), splat(np.int32(1), LANES)
    lost = convert(margins, i32) - maximum(bitcast(exponents, i32), ones) + np.int32(1 - bias)
    lost = minimum(maximum(lost, zeros), splat(np.int32(most), LANES))
    lost = select(exponents == form[2] - 2, maximum(lost, ones) - ones, lost)
    return bitcast(select(exponents == form[2] - 1, zeros, lost), u32)


@kernel
def _round(x, margins, form, bias, most, out):
    bits, mantissa, exponents, _, _, _ = form
    zeros, ones = splat(np.uint32(0), LANES), splat(np.uint32(1), LANES)
    sign, infinity = np.uint32(1 << (bits - 1)), np.uint32((exponents - 1) << mantissa)
    for i in range(0, x.size, LANES):
        values = convert(load(x, i, LANES), u32)
        magnitude = values & (sign - np.uint32(1))
        lost = _lost(magnitude >> mantissa, load(margins, i, LANES), form, bias, most)
        loses = lost > 0
        half = ((ones << lost) - ones) >> 1
        odd = select(loses, (magnitude >> lost) & 1, zeros)
        rounded = ((magnitude + half + odd) >> lost) << lost
        rounded = select(rounded >= infinity, (magnitude >> lost) << lost, rounded)
        found = select(loses & (rounded == 0), zeros, (values & sign) | rounded)
        store(out, i, convert_like(found, out))


def round_floats(x: np.ndarray, margins: np.ndarray, most: int, out: np.ndarray) -> None:
    form = format_of("round_floats", x)
    expect_size("round_floats", "margins", margins, x.size)
    expect_size("round_floats", "out", out, x.size)
    _round(as_writable(as_bits(x)), margins, tuple(form), _bias(form), most, as_bits(out))


def _bias(form: FloatFormat) -> int:
    """Difference of the biases of float32 and of a format."""
    return 128 - form.exponents // 2


# -- packing ---------------------------------------------------------------------------------------------------


@kernel
def _widths(x, margins, form, bias, most, signed, widths):
    """Write the kept bits of each element and their number, 0 for +0; return the sum of the numbers."""
    bits, mantissa, exponents, _, _, _ = form
    zeros, total = splat(np.uint32(0), LANES), splat(np.uint32(0), LANES)
    full = splat(np.uint32(1 + mantissa), LANES)
    for i in range(0, x.size, LANES):
        values = convert(load(x, i, LANES), u32)
        lost = _lost((values >> mantissa) & (exponents - 1), load(margins, i, LANES), form, bias, most)
        width = select(values != 0, full - lost, zeros)
        store(signed, i, (((values & ((1 << mantissa) - 1)) >> lost) << 1) | (values >> (bits - 1)))
        store(widths, i, convert(width, u8))
        total = total + width  # past the end values are 0
    return np.int64(sum_integers(total))


@kernel
def _write(signed, widths, size, out):
    """Write `size` numbers of these widths, at most 24 bits; return the number of bytes."""
    at, held, used = np.uint64(0), np.uint64(0), np.uint64(0)
    for i in range(0, size - 1, 2):
        first, second = np.uint64(widths[i]), np.uint64(widths[i + 1])
        low = np.uint64(signed[i]) & ((_U1 << first) - _U1)
        high = np.uint64(signed[i + 1]) & ((_U1 << second) - _U1)
        held |= (low | (high << first)) << used
        used += first + second
        poke(out, at, held)
        full = used >> _U3
        at, held, used = at + full, held >> (full << _U3), used & _U7
    if size & 1:
        last = np.uint64(widths[size - 1])
        held |= (np.uint64(signed[size - 1]) & ((_U1 << last) - _U1)) << used
        used += last
        poke(out, at, held)
        full = used >> _U3
        at, used = at + full, used & _U7
    return np.int64(at + ((used + _U7) >> _U3))


@kernel
def _pack(x, margins, first, end, form, bias, most_lost, words, memory, out, at, most):
    """Pack chunks `first` to `end` into out[at:most]; return where they end, or -1 if they do not fit."""
    symbols, signed, widths, buffers, written = memory
    lengths, counts = np.empty(STREAMS, np.int64), np.empty(LEVELS + 1, np.int64)
    for number in range(first, end):
        chunk = x[number * CHUNK : (number + 1) * CHUNK]
        stored = chunk.size * (form[0] >> 3)
        mean = mean_of(chunk, form)
        symbols_of(chunk, form, mean, symbols, counts)
        streams.write_streams(symbols, chunk.size, words, buffers, lengths)
        part = margins[number * CHUNK : (number + 1) * CHUNK]
        bits = _widths(chunk, part, form, bias, most_lost, signed, widths)
        kind, size = FLAT, streams.streams_bytes(lengths) + ((bits + 7) >> 3)
        if size >= stored:
            kind, size = STORED, stored
        if at + size > most:
            return -1
        put_word(out, TABLE_BYTES * number, size | (kind << FORM_SHIFT))
        if kind == STORED:
            store_chunk(chunk, out, at)
            at += size
        else:
            at = streams.copy_streams(mean, buffers, lengths, out, at)
            count = _write(signed, widths, chunk.size, written)
            for i in range(count):
                out[at + i] = written[i]
            at += count
    return at


def pack_rounded(x: np.ndarray, margins: np.ndarray, most: int, code: PrefixCode, out: np.ndarray) -> int:
    form = format_of("pack_rounded", x)
    expect_size("pack_rounded", "margins", margins, x.size)
    expect_room("pack_rounded", x, out)
    bits, chunks = as_writable(as_bits(x)), form.chunks(x.size)
    shape = tuple(form), _bias(form), most, code.words
    start, limit = TABLE_BYTES * chunks, x.nbytes - 1

    def pack(part: range, at: int, most: int) -> int:
        return int(_pack(bits, margins, part.start, part.stop, *shape, _scratch.packing, out, at, most))

    return pack_in_parts(pack, chunks, CHUNK * x.itemsize, start, limit, out)


# -- unpacking -------------------------------------------------------------------------------------------------


@kernel
def _known(symbols, is_kept, start, margins, form, bias, most, back, exponents, widths):
    """Find exponents, in place in the element, and widths of one stream; return the sum of the widths."""
    _, mantissa, num_exponents, special, _, _ = form
    zeros, total = splat(np.uint32(0), LANES), splat(np.uint32(0), LANES)
    full = splat(np.uint32(1 + mantissa), LANES)
    for i in range(0, margins.size, LANES):
        symbol = convert(load(symbols, start + i, LANES), u32)
        found = symbol + back
        found = select(found >= num_exponents, found - (num_exponents - 1), found)
        found = select((symbol != 0) & (symbol != special), found, zeros)
        some = (load(is_kept, start + i, LANES) != 0) & lanes_below(margins.size - i, LANES)
        width = select(some, full - _lost(found, load(margins, i, LANES), form, bias, most), zeros)
        store(exponents, i, found << mantissa)
        store(widths, i, convert(width, u8))
        total = total + width
    return np.int64(sum_integers(total))


@kernel
def _read(body, bit, widths, signed):
    """Read numbers of these widths from a bit of the body on; return the bit after them. All lie inside the body."""
    place, i = np.uint64(bit), 0
    readable = np.uint64(max(0, body.size - 8)) << _U3
    while i < widths.size and place <= readable and body.size >= 8:
        width = np.uint64(widths[i])
        signed[i] = np.uint32((peek(body, place >> _U3) >> (place & _U7)) & ((_U1 << width) - _U1))
        place += width
        i += 1
    while i < widths.size:
        width = np.uint64(widths[i])
        signed[i] = np.uint32((streams.peek_safely(body, place >> _U3) >> (place & _U7)) & ((_U1 << width) - _U1))
        place += width
        i += 1
    return np.int64(place)


@kernel
def _join(exponents, signed, widths, form, out):
    """Join what was read; return whether an element is one that a writer would not have sent so."""
    bits, mantissa, _, _, _, _ = form
    zeros, full, wrong = splat(np.uint32(0), LANES), splat(np.uint32(1 + mantissa), LANES), np.uint64(0)
    for i in range(0, out.size, LANES):
        width, each = convert(load(widths, i, LANES), u32), load(signed, i, LANES)
        some = width != 0
        lost = select(some, full - width, zeros)
        magnitude = load(exponents, i, LANES) | ((each >> 1) << lost)
        value = select(some, ((each & 1) << (bits - 1)) | magnitude, zeros)
        # +0 has a symbol of its own, and becomes of -0 by losing bits.
        wrong |= mask_bits(some & (magnitude == 0) & ((value == 0) | (lost > 0)))
        store(out, i, convert_like(value, out))
    return wrong != np.uint64(0)


@kernel
def _rounds_to_itself(x, margins, form, bias, most):
    """Whether all elements are as `round_floats` writes them."""
    bits, mantissa, _, _, _, _ = form
    ones, wrong = splat(np.uint32(1), LANES), np.uint64(0)
    for i in range(0, x.size, LANES):
        values = convert(load(x, i, LANES), u32)
        magnitude = values & np.uint32((1 << (bits - 1)) - 1)
        lost = _lost(magnitude >> mantissa, load(margins, i, LANES), form, bias, most)
        changes = (magnitude & ((ones << lost) - ones)) != 0
        wrong |= mask_bits(changes | ((lost > 0) & (magnitude == 0) & (values != 0)))
    return wrong == np.uint64(0)


@kernel
def _unpack(body, margins, first, end, at, form, bias, most, code, memory, out):
    """Unpack chunks `first` to `end`, which begin at body[at]; return where they end, or -1 if they are invalid."""
    words, lookup, code_lengths = code
    symbols, is_kept, exponents, signed, widths, specials, wide = memory
    lengths, counts = np.empty(STREAMS, np.int64), np.empty(LEVELS + 1, np.int64)
    for number in range(first, end):
        entry = np.int64(0)
        for byte in range(4):
            entry |= np.int64(body[TABLE_BYTES * number + byte]) << (8 * byte)
        size, kind = entry & SIZE_MASK, entry >> FORM_SHIFT
        if size > body.size - at:
            return -1
        chunk = out[number * CHUNK : (number + 1) * CHUNK]
        part = margins[number * CHUNK : (number + 1) * CHUNK]
        stored = chunk.size * (form[0] >> 3)
        if kind == STORED:
            if size != stored:
                return -1
            load_chunk(body, at, chunk)
            symbols_of(chunk, form, mean_of(chunk, form), wide, counts)
            streams.measure_streams(wide, chunk.size, words, lengths)
            bits = _widths(chunk, part, form, bias, most, signed, widths)
            if streams.streams_bytes(lengths) + ((bits + 7) >> 3) < stored:
                return -1
            if not _rounds_to_itself(chunk, part, form, bias, most):
                return -1
        elif kind != FLAT or size >= stored:
            return -1
        else:
            place, num_specials = streams.read_streams(
                body, at, at + size, chunk.size, lookup, code_lengths, symbols, specials
            )
            if place < 0 or (num_specials > 0 and form[3] < 256):
                return -1
            if not floats.symbols_fit(symbols, chunk.size, form):
                return -1
            mean = np.int64(body[at])
            if mean < 1 or mean >= form[2]:
                return -1
            floats.count_kept(symbols, chunk.size, specials, num_specials, is_kept)
            back, share = (form[2] - 1 - turn_of(form, mean)) % (form[2] - 1), (chunk.size + STREAMS - 1) // STREAMS
            bits = np.int64(0)
            for stream in range(STREAMS):
                low, high = min(chunk.size, stream * share), min(chunk.size, (stream + 1) * share)
                bits += _known(
                    symbols, is_kept, stream * streams.STRIDE, part[low:high], form, bias, most, back,
                    exponents[low:high], widths[low:high],
                )  # fmt: skip
            if at + size - place != (bits + 7) >> 3:
                return -1
            last = _read(body, 8 * place, widths[: chunk.size], signed)
            if (last & 7) != 0 and (np.int64(body[last >> 3]) >> (last & 7)) != 0:
                return -1
            if _join(exponents, signed, widths[: chunk.size], form, chunk) or mean_of(chunk, form) != mean:
                return -1
        at += size
    return at


def unpack_rounded(body: np.ndarray, margins: np.ndarray, most: int, code: PrefixCode, out: np.ndarray) -> bool:
    form = format_of("unpack_rounded", out)
    expect_size("unpack_rounded", "margins", margins, out.size)
    tables, bits, readable = (code.words, code.lookup, code.lengths), as_bits(out), as_writable(body)
    chunks = form.chunks(out.size)
    start = TABLE_BYTES * chunks
    if body.size < start or body.size >= out.nbytes:
        return False
    sizes = body[:start].view("<u4") & SIZE_MASK
    places = start + np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    if places[-1] != body.size:
        return False
    shape = tuple(form), _bias(form), most, tables

    def unpack(part: range) -> int:
        at = int(places[part.start])
        return int(_unpack(readable, margins, part.start, part.stop, at, *shape, _scratch.unpacking, bits))

    return min(run_all([partial(unpack, part) for part in shares(chunks, LEAST_CHUNKS)])) >= 0
