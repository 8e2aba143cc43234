"""Lossless compression of floats with exponents in codes of four bits. Contracts: `reference.fixed`.

A chunk stays in the cache: a sample of it gives the base, one sweep writes codes, signs and mantissas, and one over the
codes lists what is escaped.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from gradwire.kernels.cpu.chunk_counts import mean_and_largest
from gradwire.kernels.cpu.compile import inlined, kernel
from gradwire.kernels.cpu.elements import LANES, as_writable
from gradwire.kernels.cpu.fields import fields_bytes
from gradwire.kernels.cpu.lanes import (
    convert,
    convert_like,
    mask_bits,
    minimum,
    popcount,
    select,
    splat,
    sum_integers,
    trailing_zeros,
)
from gradwire.kernels.cpu.parallel import run_all, shares
from gradwire.kernels.cpu.reduce import count_nonfinite
from gradwire.kernels.cpu.stored import LEAST_CHUNKS, load_chunk, pack_in_parts, put_word, store_chunk
from gradwire.kernels.cpu.vector import load, store, store_until, u8, u32
from gradwire.kernels.fixed_format import BELOW, CHUNK, CODE_BITS, ESCAPED, PERIOD, SAMPLED, TABLE_BYTES
from gradwire.kernels.float_format import as_bits, format_of
from gradwire.kernels.layout import expect_room


@inlined
def _exponents(values, form):
    return (values >> form[1]) & (form[2] - 1)


@inlined
def _signed(values, form):
    """Signs and mantissas."""
    bits, mantissa, _, _, _, _ = form
    return ((values >> (bits - 1)) << mantissa) | (values & ((1 << mantissa) - 1))


@inlined
def _codes(chunk, values, form, base):
    """Codes of `values`, a vector of the chunk. Integers wrap, so that exponents up to the base are large."""
    found = _exponents(values, form)
    most = convert_like(splat(np.uint32(ESCAPED - 1), LANES), chunk)
    return select(found != 0, minimum(found - (base + 1), most) + 1, found)


@kernel
def _base_of(chunk, form):
    none = convert_like(splat(np.uint32(0), SAMPLED), chunk)
    sums, counts = none, none  # 16 bits hold the sum of CHUNK / PERIOD exponents
    for i in range(0, chunk.size, PERIOD):
        found = _exponents(load(chunk, i, SAMPLED), form)
        sums, counts = sums + found, counts + minimum(found, none + 1)
    total, count = np.int64(sum_integers(convert(sums, u32))), np.int64(sum_integers(convert(counts, u32)))
    mean = (total + count // 2) // count if count > 0 else np.int64(1)
    return max(0, min(mean - BELOW, form[2] - 1 - ESCAPED))


@kernel
def _unescaped_bytes(size, form):
    return 1 + fields_bytes(size, CODE_BITS) + fields_bytes(size, 1 + form[1])


# -- packing ---------------------------------------------------------------------------------------------------


@inlined
def _pack_bytes(chunk, whole, form, base, out, at):
    """Write codes and `whole` bytes of the fields. With `whole` as a constant, vectors stay in registers."""
    size = chunk.size
    half = (size + 1) >> 1
    fields = at + half
    for i in range(0, half, LANES):
        low, high = load(chunk, i, LANES), load(chunk, half + i, LANES)
        both = _codes(chunk, low, form, base) | (_codes(chunk, high, form, base) << CODE_BITS)
        store_until(out, at + i, fields, convert(both, u8))
        low, high = _signed(low, form), _signed(high, form)
        for byte in range(whole):
            field = fields + byte * size
            store_until(out, field + i, field + half, convert(low >> (8 * byte), u8))
            store_until(out, field + half + i, field + size, convert(high >> (8 * byte), u8))


@kernel
def _pack_unescaped(chunk, form, base, out, at):
    """Write all but the escaped exponents to out[at:]."""
    size, whole = chunk.size, (1 + form[1]) >> 3
    out[at] = np.uint8(base)
    if whole == 1:
        _pack_bytes(chunk, 1, form, base, out, at + 1)
    else:
        _pack_bytes(chunk, 3, form, base, out, at + 1)
    at, shift = at + 1 + ((size + 1) >> 1) + whole * size, 8 * whole
    for field in (4, 2, 1):
        if (1 + form[1]) & field:
            at = _pack_field(chunk, form, shift, field, out, at)
            shift += field


@kernel
def _pack_field(chunk, form, shift, field, out, at):
    """Write a field of less than a byte of signs and mantissas to out[at:]; return where it ends."""
    count, mask = (chunk.size * field + 7) >> 3, (1 << field) - 1
    for i in range(0, count, LANES):
        packed = convert((_signed(load(chunk, i, LANES), form) >> shift) & mask, u8)
        for plane in range(1, 8 // field):
            more = convert((_signed(load(chunk, plane * count + i, LANES), form) >> shift) & mask, u8)
            packed = packed | (more << (plane * field))
        store_until(out, at + i, at + count, packed)
    return at + count


@inlined
def _escaped_at(body, at, i, half, plane):
    """Which codes of a plane from i on are escaped, as bits; the codes of both planes begin at body[at]."""
    escaped = mask_bits(((load(body, at + i, LANES) >> (CODE_BITS * plane)) & ESCAPED) == ESCAPED)
    return escaped if i + LANES <= half else escaped & ((np.uint64(1) << np.uint64(half - i)) - np.uint64(1))


@kernel
def _pack_escaped(chunk, form, codes, out, at, room, nonfinite):
    """Write the exponents whose code at out[codes:] is escaped to out[at:room].

    Returns where they end, or would end if there were room.
    """
    _, mantissa, exponents, _, _, _ = form
    half = (chunk.size + 1) >> 1
    for plane in range(2):
        for i in range(0, half, LANES):
            escaped = _escaped_at(out, codes, i, half, plane)
            while escaped != 0:
                value = np.int64(chunk[plane * half + i + trailing_zeros(escaped)])
                found = (value >> mantissa) & (exponents - 1)
                if found == exponents - 1:
                    nonfinite[0] = 1
                if at < room:
                    out[at] = np.uint8(found)
                at += 1
                escaped &= escaped - np.uint64(1)
    return at


@kernel
def _pack(x, first, last, form, out, at, most, nonfinite):
    """Pack chunks `first` to `last` into out[at:most]; return where they end, or -1 if they do not fit.

    Sets nonfinite[0] to 1 if one of the elements packed is not finite.
    """
    for number in range(first, last):
        chunk = x[number * CHUNK : (number + 1) * CHUNK]
        stored = at + chunk.size * (form[0] >> 3)
        room = min(most, stored - 1)
        base = _base_of(chunk, form)
        end = at + _unescaped_bytes(chunk.size, form)
        if end <= room:
            _pack_unescaped(chunk, form, base, out, at)
            end = _pack_escaped(chunk, form, at + 1, out, end, room, nonfinite)
        if end > room:
            if stored > most:
                return -1
            store_chunk(chunk, out, at)
            end = stored
            if mean_and_largest(chunk, form)[1] == form[2] - 1:
                nonfinite[0] = 1
        put_word(out, TABLE_BYTES * number, end - at)
        at = end
    return at


def pack_fixed(x: np.ndarray, out: np.ndarray) -> tuple[int, bool]:
    form = format_of("pack_fixed", x)
    expect_room("pack_fixed", x, out)
    bits, chunks, nonfinite = as_writable(as_bits(x)), form.chunks(x.size), np.zeros(1, np.uint8)

    def pack(part: range, at: int, most: int) -> int:
        return int(_pack(bits, part.start, part.stop, tuple(form), out, at, most, nonfinite))

    length = pack_in_parts(pack, chunks, CHUNK * x.itemsize, TABLE_BYTES * chunks, x.nbytes - 1, out)
    return length, not nonfinite[0] if length >= 0 else count_nonfinite(x) == 0


@kernel
def _packed_chunk_bytes(chunk, form):
    """Bytes of the chunk if it is packed, even where storing it would take fewer."""
    base, count = _base_of(chunk, form), 0
    for i in range(0, chunk.size, LANES):
        count += popcount(mask_bits(_codes(chunk, load(chunk, i, LANES), form, base) == ESCAPED))
    return _unescaped_bytes(chunk.size, form) + count


@kernel
def _packed_bytes(x, form):
    total = TABLE_BYTES * ((x.size + CHUNK - 1) // CHUNK)
    for start in range(0, x.size, CHUNK):
        chunk = x[start : start + CHUNK]
        total += min(_packed_chunk_bytes(chunk, form), chunk.size * (form[0] >> 3))
    return total


def packs_shorter_fixed(x: np.ndarray) -> bool:
    form = format_of("packs_shorter_fixed", x)
    return bool(_packed_bytes(as_writable(as_bits(x)), tuple(form)) < x.nbytes)


# -- unpacking -------------------------------------------------------------------------------------------------


@inlined
def _placed(signed, form):
    """Undo `_signed`: signs and mantissas at their places in an element."""
    bits, mantissa, _, _, _, _ = form
    return ((signed >> mantissa) << (bits - 1)) | (signed & ((1 << mantissa) - 1))


@inlined
def _joined(body, codes, fields, size, whole, chunk, form, base):
    """Elements from their codes and `whole` bytes of their fields, of which the next begins `size` bytes later."""
    values = select(codes != 0, codes + base, codes) << form[1]
    for byte in range(whole):
        signed = convert_like(load(body, fields + byte * size, LANES), chunk) << (8 * byte)
        values = values | _placed(signed, form)
    return values


@inlined
def _join_bytes(body, at, whole, form, base, chunk):
    """Fill the chunk from codes and whole bytes. With `whole` as a constant, vectors stay in registers."""
    size = chunk.size
    half = (size + 1) >> 1
    for i in range(0, half, LANES):
        both, fields = convert_like(load(body, at + i, LANES), chunk), at + half + i
        low = _joined(body, both & ESCAPED, fields, size, whole, chunk, form, base)
        store_until(chunk, i, half, low)
        store(chunk, half + i, _joined(body, both >> CODE_BITS, fields + half, size, whole, chunk, form, base))


@kernel
def _join(body, at, form, base, chunk):
    """Fill the chunk from the codes at body[at:] and the fields after them; return whether padding is 0."""
    size, whole = chunk.size, (1 + form[1]) >> 3
    if whole == 1:
        _join_bytes(body, at, 1, form, base, chunk)
    else:
        _join_bytes(body, at, 3, form, base, chunk)
    fields, shift = at + ((size + 1) >> 1) + whole * size, 8 * whole
    for field in (4, 2, 1):
        if (1 + form[1]) & field:
            if not _join_field(body, fields, form, shift, field, chunk):
                return False
            fields += (size * field + 7) >> 3
            shift += field
    return True


@kernel
def _join_field(body, at, form, shift, field, chunk):
    """Add a field of less than a byte, at body[at:], to the elements; return whether its padding is 0."""
    size, per, mask = chunk.size, 8 // field, (1 << field) - 1
    count = (size * field + 7) >> 3
    for plane in range(per):
        start, end = plane * count, min((plane + 1) * count, size)
        for i in range(start, end, LANES):
            found = convert_like((load(body, at + i - start, LANES) >> (plane * field)) & mask, chunk)
            store_until(chunk, i, end, load(chunk, i, LANES) | _placed(found << shift, form))
    for place in range(size, per * count):
        plane = place // count
        if (np.int64(body[at + place - plane * count]) >> (plane * field)) & mask != 0:
            return False
    return True


@kernel
def _insert_escaped(body, codes, first, end, form, base, chunk):
    """Insert the exponents in body[first:end] where the codes at body[codes:] are escaped; return whether all fit."""
    _, mantissa, exponents, _, _, _ = form
    half = (chunk.size + 1) >> 1
    for plane in range(2):
        for i in range(0, half, LANES):
            escaped = _escaped_at(body, codes, i, half, plane)
            while escaped != 0:
                place = plane * half + i + trailing_zeros(escaped)
                escaped &= escaped - np.uint64(1)
                if first == end or place >= chunk.size:
                    return False
                found = np.int64(body[first])
                if found == 0 or found >= exponents or 0 < found - base < ESCAPED:
                    return False
                others = np.int64(chunk[place]) & ~((exponents - 1) << mantissa)
                chunk[place] = others | (found << mantissa)
                first += 1
    return first == end


@kernel
def _unpack_chunk(body, at, end, form, chunk):
    """Read a packed chunk at body[at:end]; return whether it is one."""
    codes, escaped = at + 1, at + _unescaped_bytes(chunk.size, form)
    if escaped > end:
        return False
    base, fields = np.int64(body[at]), codes + ((chunk.size + 1) >> 1)
    if base > form[2] - 1 - ESCAPED:
        return False
    if chunk.size & 1 and body[fields - 1] >> CODE_BITS != 0:
        return False
    if not _join(body, codes, form, base, chunk):
        return False
    return _insert_escaped(body, codes, escaped, end, form, base, chunk) and _base_of(chunk, form) == base


@kernel
def _unpack(body, places, form, out, first, last):
    """Unpack chunks `first` to `last`; chunk i is body[places[i]:places[i + 1]]. Return 0, or -1 if one is invalid."""
    for number in range(first, last):
        chunk, at, end = out[number * CHUNK : (number + 1) * CHUNK], places[number], places[number + 1]
        stored = chunk.size * (form[0] >> 3)
        if end - at < stored:
            if not _unpack_chunk(body, at, end, form, chunk):
                return -1
        elif end - at > stored:
            return -1
        else:
            load_chunk(body, at, chunk)
            if _packed_chunk_bytes(chunk, form) < stored:
                return -1
    return 0


def unpack_fixed(body: np.ndarray, out: np.ndarray) -> bool:
    form = format_of("unpack_fixed", out)
    chunks, bits, readable = form.chunks(out.size), as_bits(out), as_writable(body)
    start = TABLE_BYTES * chunks
    if not start <= body.size < out.nbytes:
        return False
    places = start + np.concatenate([[0], np.cumsum(body[:start].view("<u4"), dtype=np.int64)])
    if places[-1] != body.size:
        return False

    def unpack(part: range) -> int:
        return int(_unpack(readable, places, tuple(form), bits, part.start, part.stop))

    return min(run_all([partial(unpack, part) for part in shares(chunks, LEAST_CHUNKS)])) >= 0
