"""Lossless compression of floats. Contracts: `reference.floats`.

A chunk stays in the cache for several sweeps: one finds symbols and counts, `streams` writes code words, one drops
exponents and zeros, `fields` packs the rest. A chunk without +0 is handled in whole vectors.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np

from gradwire.kernels.cpu import streams
from gradwire.kernels.cpu.chunk_counts import (
    count_levels,
    mantissa_bytes,
    mean_and_largest,
    mean_of,
    symbols_of,
    turn_of,
)
from gradwire.kernels.cpu.compile import kernel
from gradwire.kernels.cpu.elements import LANES, as_writable
from gradwire.kernels.cpu.fields import fields_bytes, pack_fields, unpack_fields
from gradwire.kernels.cpu.lanes import convert, convert_like, mask_bits, popcount, select, splat
from gradwire.kernels.cpu.parallel import run_all, shares
from gradwire.kernels.cpu.partition import PITCH, gather_levels, keep, keep_by_level, spread
from gradwire.kernels.cpu.reduce import count_nonfinite
from gradwire.kernels.cpu.stored import LEAST_CHUNKS, load_chunk, pack_in_parts, put_word, store_chunk
from gradwire.kernels.cpu.vector import load, store, store_until, u32
from gradwire.kernels.float_format import (
    CHUNK,
    FLAT,
    FORM_SHIFT,
    LEVELLED,
    LEVELS,
    SIZE_MASK,
    STORED,
    STREAMS,
    TABLE_BYTES,
    as_bits,
    format_of,
)
from gradwire.kernels.layout import expect_room, expect_size
from gradwire.kernels.prefix_code import NUM_SYMBOLS, PrefixCode

_U1 = np.uint64(1)


class _Scratch(threading.local):
    """Scratch memory of a thread for one chunk, kept between calls."""

    def __init__(self) -> None:
        self.packing = (
            np.empty(CHUNK, np.uint16),  # symbols
            np.empty(LEVELS * PITCH, np.uint32),  # signs and mantissas, level after level
            np.empty(PITCH, np.uint8),  # levels
            np.empty(STREAMS * streams.BUFFER_BYTES, np.uint8),
        )
        num_symbols = STREAMS * streams.STRIDE
        self.unpacking = (
            np.empty(num_symbols, np.uint8),  # symbols
            np.empty(num_symbols, np.uint8),  # whether they are kept
            np.empty(PITCH, np.uint32),  # signs and mantissas
            np.empty(LEVELS * PITCH, np.uint32),  # the same, level after level
            np.empty(PITCH, np.uint8),  # levels
            np.empty(CHUNK, np.uint64),  # positions of zeros after an escape
            np.empty(CHUNK, np.uint16),  # symbols, to measure how long a chunk would be
        )


_scratch = _Scratch()


# -- packing ---------------------------------------------------------------------------------------------------


@kernel
def _signed(x, form, kept):
    """Write the sign and mantissa of every element to `kept`."""
    bits, mantissa, _, _, _, _ = form
    for i in range(0, x.size, LANES):
        values = convert(load(x, i, LANES), u32)
        signed = ((values >> (bits - 1)) << mantissa) | (values & ((1 << mantissa) - 1))
        store_until(kept, i, x.size, signed)


@kernel
def _pack_mantissas(x, form, counts, kind, kept, levels, out, at):
    """Write signs and mantissas to out[at:]; return where they end."""
    _, mantissa, _, _, step, _ = form
    count = x.size - counts[LEVELS]
    if kind == FLAT:
        if count == x.size:
            _signed(x, form, kept)
        else:
            keep(x, form, kept)
        return pack_fields(kept[:count], 1 + mantissa, out, at)
    keep_by_level(x, form, kept, levels)
    at = pack_fields(levels[:count], 2, out, at)
    for level in range(LEVELS):
        chosen = kept[level * PITCH : level * PITCH + counts[level]]
        at = pack_fields(chosen, 1 + mantissa - level * step, out, at)
    return at


@kernel
def _pack(x, first, end, form, words, memory, out, at, most, nonfinite):
    """Pack chunks `first` to `end` into out[at:most]; return where they end, or -1 if they do not fit.

    Sets nonfinite[0] to 1 if one of the elements packed is not finite.
    """
    symbols, kept, levels, buffers = memory
    lengths, counts = np.empty(STREAMS, np.int64), np.empty(LEVELS + 1, np.int64)
    for number in range(first, end):
        chunk = x[number * CHUNK : (number + 1) * CHUNK]
        stored = chunk.size * (form[0] >> 3)
        mean, largest = mean_and_largest(chunk, form)
        if largest == form[2] - 1:
            nonfinite[0] = 1
        symbols_of(chunk, form, mean, symbols, counts)
        streams.write_streams(symbols, chunk.size, words, buffers, lengths)
        kind, mantissas = mantissa_bytes(form, counts)
        size = streams.streams_bytes(lengths) + mantissas
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
            at = _pack_mantissas(chunk, form, counts, kind, kept, levels, out, at)
    return at


def pack_floats(x: np.ndarray, code: PrefixCode, out: np.ndarray) -> tuple[int, bool]:
    form = format_of("pack_floats", x)
    expect_room("pack_floats", x, out)
    bits, chunks = as_writable(as_bits(x)), form.chunks(x.size)
    nonfinite = np.zeros(1, np.uint8)

    def pack(part: range, at: int, most: int) -> int:
        chosen = (bits, part.start, part.stop, tuple(form))
        return int(_pack(*chosen, code.words, _scratch.packing, out, at, most, nonfinite))

    length = pack_in_parts(pack, chunks, CHUNK * x.itemsize, TABLE_BYTES * chunks, x.nbytes - 1, out)
    return length, not nonfinite[0] if length >= 0 else count_nonfinite(x) == 0


# -- packed length ---------------------------------------------------------------------------------------------


@kernel
def _packed_chunk_bytes(chunk, form, words, symbols, counts, lengths):
    """Bytes of the chunk if it is packed, even where storing it would take fewer."""
    symbols_of(chunk, form, mean_of(chunk, form), symbols, counts)
    streams.measure_streams(symbols, chunk.size, words, lengths)
    return streams.streams_bytes(lengths) + mantissa_bytes(form, counts)[1]


@kernel
def _packed_bytes(x, form, words, symbols):
    lengths, counts = np.empty(STREAMS, np.int64), np.empty(LEVELS + 1, np.int64)
    total = TABLE_BYTES * ((x.size + CHUNK - 1) // CHUNK)
    for start in range(0, x.size, CHUNK):
        chunk = x[start : start + CHUNK]
        packed = _packed_chunk_bytes(chunk, form, words, symbols, counts, lengths)
        total += min(packed, chunk.size * (form[0] >> 3))
    return total


def packs_shorter(x: np.ndarray, code: PrefixCode) -> bool:
    form = format_of("packs_shorter", x)
    return bool(_packed_bytes(as_writable(as_bits(x)), tuple(form), code.words, _scratch.packing[0]) < x.nbytes)


@kernel
def _count(x, form, symbols, counts):
    levels = np.empty(LEVELS + 1, np.int64)
    several = np.zeros((4, 512), np.int64)  # in turn, so that increments of the same symbol do not wait for each other
    for start in range(0, x.size, CHUNK):
        chunk = x[start : start + CHUNK]
        symbols_of(chunk, form, mean_of(chunk, form), symbols, levels)
        for i in range(chunk.size):
            several[i & 3, symbols[i]] += 1
    for symbol in range(counts.size):
        for each in range(4):
            counts[symbol] += several[each, symbol]


def exponent_counts(x: np.ndarray, counts: np.ndarray) -> None:
    expect_size("exponent_counts", "counts", counts, NUM_SYMBOLS)
    form = format_of("exponent_counts", x)
    _count(as_writable(as_bits(x)), tuple(form), _scratch.packing[0], counts)


# -- unpacking -------------------------------------------------------------------------------------------------


@kernel
def _join(symbols, start, kept, form, back, out):
    """Join exponents, signs and mantissas of one stream whose exponents are all above 0."""
    bits, mantissa, exponents, _, _, _ = form
    for i in range(0, out.size, LANES):
        moved = convert(load(symbols, start + i, LANES), u32) + back
        found = select(moved >= exponents, moved - (exponents - 1), moved)
        signed = load(kept, i, LANES)
        values = ((signed >> mantissa) << (bits - 1)) | (found << mantissa) | (signed & ((1 << mantissa) - 1))
        store(out, i, convert_like(values, out))


@kernel
def count_kept(symbols, size, specials, num_specials, is_kept):
    """Mark elements other than +0 with 1 at their place among the symbols; return their number."""
    share, total = (size + STREAMS - 1) // STREAMS, 0
    for stream in range(STREAMS):
        start = stream * streams.STRIDE
        end = start + max(0, min(size, (stream + 1) * share) - stream * share)
        for i in range(start, end, LANES):
            kept = load(symbols, i, LANES) != 0
            store(is_kept, i, select(kept, splat(np.uint8(1), LANES), splat(np.uint8(0), LANES)))
            there = mask_bits(kept)
            if end - i < LANES:
                there &= (_U1 << np.uint64(end - i)) - _U1
            total += popcount(there)
    for i in range(num_specials):
        is_kept[specials[i]] = 1
    return total + num_specials


@kernel
def _unpack_mantissas(body, at, end, kind, form, counts, levels, by_level, kept):
    """Fill `kept` with signs and mantissas; return False if they are not in the form that a writer would choose."""
    _, mantissa, _, _, step, _ = form
    width = 1 + mantissa
    if kind == FLAT:
        if end - at != fields_bytes(kept.size, width) or not unpack_fields(body, at, width, 0, kept):
            return False
        count_levels(kept, step, counts)
        return mantissa_bytes(form, counts)[0] == FLAT
    start = at + fields_bytes(kept.size, 2)
    if start > end or not unpack_fields(body, at, 2, 0, levels):
        return False
    counts[:] = 0
    for i in range(levels.size):
        counts[levels[i]] += 1
    chosen, size = mantissa_bytes(form, counts)
    if chosen != LEVELLED or end - at != size:
        return False
    for level in range(LEVELS):
        chosen = by_level[level * PITCH : level * PITCH + counts[level]]
        if not unpack_fields(body, start, width - level * step, 0, chosen):
            return False
        start += fields_bytes(counts[level], width - level * step)
    return gather_levels(levels, step, by_level, kept)


@kernel
def _unpack(body, first, end, at, form, code, memory, out):
    """Unpack chunks `first` to `end`, which begin at body[at]; return where they end, or -1 if they are invalid."""
    words, lookup, code_lengths = code
    symbols, is_kept, kept, by_level, levels, specials, wide = memory
    lengths, counts = np.empty(STREAMS, np.int64), np.empty(LEVELS + 1, np.int64)
    for number in range(first, end):
        entry = 0
        for byte in range(4):
            entry |= np.int64(body[TABLE_BYTES * number + byte]) << (8 * byte)
        size, kind = entry & SIZE_MASK, entry >> FORM_SHIFT
        if size > body.size - at:
            return -1
        chunk = out[number * CHUNK : (number + 1) * CHUNK]
        stored = chunk.size * (form[0] >> 3)
        if kind == STORED:
            if size != stored:
                return -1
            load_chunk(body, at, chunk)
            if _packed_chunk_bytes(chunk, form, words, wide, counts, lengths) < stored:
                return -1
        elif kind > LEVELLED or size >= stored:
            return -1
        else:
            first, num_specials = streams.read_streams(
                body, at, at + size, chunk.size, lookup, code_lengths, symbols, specials
            )
            if first < 0 or (num_specials > 0 and form[3] < 256):
                return -1
            if not symbols_fit(symbols, chunk.size, form):
                return -1
            count = count_kept(symbols, chunk.size, specials, num_specials, is_kept)
            parts = kept[:count]
            if not _unpack_mantissas(body, first, at + size, kind, form, counts, levels[:count], by_level, parts):
                return -1
            kept[count] = 0
            mean = np.int64(body[at])
            if not _write_chunk(symbols, is_kept, kept, count, num_specials, form, mean, chunk):
                return -1
            if mean_of(chunk, form) != mean:
                return -1
        at += size
    return at


@kernel
def symbols_fit(symbols, size, form):
    """Whether all symbols exist in the element type; with 8-bit exponents all do."""
    _, _, exponents, special, _, _ = form
    if exponents == 256:
        return True
    share = (size + STREAMS - 1) // STREAMS
    for stream in range(STREAMS):
        start = stream * streams.STRIDE
        for i in range(start, start + max(0, min(size, (stream + 1) * share) - stream * share)):
            if symbols[i] > special:
                return False
    return True


@kernel
def _write_chunk(symbols, is_kept, kept, count, num_specials, form, mean, out):
    """Join the parts of the elements; return False if an element that is not marked as +0 is +0."""
    back = (form[2] - 1 - turn_of(form, mean)) % (form[2] - 1)
    share = (out.size + STREAMS - 1) // STREAMS
    next_ = 0
    for stream in range(STREAMS):
        start = min(out.size, stream * share)
        part = out[start : min(out.size, start + share)]
        if count == out.size and num_specials == 0 and form[3] == 256:
            _join(symbols, stream * streams.STRIDE, kept[start : start + part.size], form, back, part)
            continue
        next_ = spread(symbols, is_kept, stream * streams.STRIDE, next_, kept, form, back, part)
        if next_ < 0:
            return False
    return True


def unpack_floats(body: np.ndarray, code: PrefixCode, out: np.ndarray) -> bool:
    form = format_of("unpack_floats", out)
    tables, bits, readable = (code.words, code.lookup, code.lengths), as_bits(out), as_writable(body)
    chunks = form.chunks(out.size)
    start = TABLE_BYTES * chunks
    if body.size < start or body.size >= out.nbytes:
        return False
    sizes = body[:start].view("<u4") & SIZE_MASK
    places = start + np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    if places[-1] != body.size:
        return False

    def unpack(part: range) -> int:
        at = int(places[part.start])
        return int(_unpack(readable, part.start, part.stop, at, tuple(form), tables, _scratch.unpacking, bits))

    return min(run_all([partial(unpack, part) for part in shares(chunks, LEAST_CHUNKS)])) >= 0
