"""Lossless compression of floats with exponents in codes of four bits. Contracts: `reference.fixed`.

A chunk stays in the cache: one sweep finds the mean, one writes codes, signs and mantissas, one lists what is escaped.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from gradwire.kernels.cpu.chunk_counts import mean_of
from gradwire.kernels.cpu.compile import inlined, kernel
from gradwire.kernels.cpu.elements import LANES, as_writable
from gradwire.kernels.cpu.fields import fields_bytes, unpack_fields
from gradwire.kernels.cpu.lanes import (
    convert,
    convert_like,
    mask_bits,
    minimum,
    popcount,
    select,
    splat,
    trailing_zeros,
)
from gradwire.kernels.cpu.parallel import run_all, shares
from gradwire.kernels.cpu.stored import LEAST_CHUNKS, load_chunk, pack_in_parts, put_word, store_chunk
from gradwire.kernels.cpu.vector import load, store, store_until, u8
from gradwire.kernels.fixed_format import BELOW, CHUNK, CODE_BITS, ESCAPED, TABLE_BYTES
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
def _codes(chunk, i, form, base):
    """Codes of the elements from i on. Integers wrap, so that exponents up to the base are large."""
    found = _exponents(load(chunk, i, LANES), form)
    most = convert_like(splat(np.uint32(ESCAPED - 1), LANES), chunk)
    return select(found != 0, minimum(found - (base + 1), most) + 1, found)


@kernel
def _base_of(chunk, form):
    return max(0, min(mean_of(chunk, form) - BELOW, form[2] - 1 - ESCAPED))


@kernel
def _unescaped_bytes(size, form):
    return 1 + fields_bytes(size, CODE_BITS) + fields_bytes(size, 1 + form[1])


# -- packing ---------------------------------------------------------------------------------------------------


@kernel
def _pack_unescaped(chunk, form, base, out, at):
    """Write all but the escaped exponents to out[at:]."""
    size, whole = chunk.size, (1 + form[1]) >> 3
    half = (size + 1) >> 1
    out[at] = np.uint8(base)
    at += 1
    fields = at + half
    for i in range(0, half, LANES):
        codes = _codes(chunk, i, form, base) | (_codes(chunk, half + i, form, base) << CODE_BITS)
        store_until(out, at + i, fields, convert(codes, u8))
    for i in range(0, size, LANES):
        signed = _signed(load(chunk, i, LANES), form)
        for byte in range(whole):
            field = fields + byte * size
            store_until(out, field + i, field + size, convert(signed >> (8 * byte), u8))
    at = fields + whole * size
    shift = 8 * whole
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


@kernel
def _pack_escaped(chunk, form, base, out, at, room):
    """Write escaped exponents to out[at:room]; return where they end, or would end if there were room."""
    _, mantissa, exponents, _, _, _ = form
    for i in range(0, chunk.size, LANES):
        escaped = mask_bits(_codes(chunk, i, form, base) == ESCAPED)
        while escaped != 0:
            if at < room:
                found = (np.int64(chunk[i + trailing_zeros(escaped)]) >> mantissa) & (exponents - 1)
                out[at] = np.uint8(found)
            at += 1
            escaped &= escaped - np.uint64(1)
    return at


@kernel
def _pack(x, first, last, form, out, at, most):
    """Pack chunks `first` to `last` into out[at:most]; return where they end, or -1 if they do not fit."""
    for number in range(first, last):
        chunk = x[number * CHUNK : (number + 1) * CHUNK]
        stored = at + chunk.size * (form[0] >> 3)
        room = min(most, stored - 1)
        base = _base_of(chunk, form)
        end = at + _unescaped_bytes(chunk.size, form)
        if end <= room:
            _pack_unescaped(chunk, form, base, out, at)
        end = _pack_escaped(chunk, form, base, out, end, room)
        if end > room:
            if stored > most:
                return -1
            store_chunk(chunk, out, at)
            end = stored
        put_word(out, TABLE_BYTES * number, end - at)
        at = end
    return at


def pack_fixed(x: np.ndarray, out: np.ndarray) -> int:
    form = format_of("pack_fixed", x)
    expect_room("pack_fixed", x, out)
    bits, chunks = as_writable(as_bits(x)), form.chunks(x.size)

    def pack(part: range, at: int, most: int) -> int:
        return int(_pack(bits, part.start, part.stop, tuple(form), out, at, most))

    return pack_in_parts(pack, chunks, CHUNK * x.itemsize, TABLE_BYTES * chunks, x.nbytes - 1, out)


@kernel
def _packed_chunk_bytes(chunk, form):
    """Bytes of the chunk if it is packed, even where storing it would take fewer."""
    base, count = _base_of(chunk, form), 0
    for i in range(0, chunk.size, LANES):
        count += popcount(mask_bits(_codes(chunk, i, form, base) == ESCAPED))
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
def _joined(body, at, shift, chunk, i, form, base):
    """Elements from their codes, at bit `shift` of the bytes from `at` on, and from signs and mantissas in `chunk`."""
    bits, mantissa, _, _, _, _ = form
    found = convert_like((load(body, at, LANES) >> shift) & ESCAPED, chunk)
    signed = load(chunk, i, LANES)
    moved = select(found != 0, found + base, found)
    return ((signed >> mantissa) << (bits - 1)) | (moved << mantissa) | (signed & ((1 << mantissa) - 1))


@kernel
def _join(body, at, form, base, chunk):
    """Join the codes at body[at:] with the signs and mantissas in `chunk`."""
    half = (chunk.size + 1) >> 1
    for i in range(0, half, LANES):
        store_until(chunk, i, half, _joined(body, at + i, 0, chunk, i, form, base))
    for i in range(half, chunk.size, LANES):
        store(chunk, i, _joined(body, at + i - half, CODE_BITS, chunk, i, form, base))


@kernel
def _insert_escaped(body, at, first, end, form, base, chunk):
    """Insert the exponents in body[first:end] where the codes at body[at:] are escaped; return whether all fit."""
    _, mantissa, exponents, _, _, _ = form
    half = (chunk.size + 1) >> 1
    for plane in range(2):
        for i in range(plane * half, half + plane * (chunk.size - half), LANES):
            codes = load(body, at + i - plane * half, LANES) >> (CODE_BITS * plane)
            escaped = mask_bits((codes & ESCAPED) == ESCAPED)
            while escaped != 0:
                place = i + trailing_zeros(escaped)
                escaped &= escaped - np.uint64(1)
                if place >= half + plane * (chunk.size - half):
                    break
                if first == end:
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
    base, codes = np.int64(body[at]), at + 1
    fields = codes + ((chunk.size + 1) >> 1)
    escaped = at + _unescaped_bytes(chunk.size, form)
    if escaped > end or base > form[2] - 1 - ESCAPED:
        return False
    if chunk.size & 1 and body[fields - 1] >> CODE_BITS != 0:
        return False
    if not unpack_fields(body, fields, 1 + form[1], 0, chunk):
        return False
    _join(body, codes, form, base, chunk)
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
