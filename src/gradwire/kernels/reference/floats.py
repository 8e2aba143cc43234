"""Lossless compression of floats: prefix codes for exponents, packed signs and mantissas.

`pack_floats` writes the chunk table, one uint32 per chunk, then the chunks. `kernels.float_format` describes a chunk.
"""

from __future__ import annotations

import numpy as np

from gradwire.kernels.float_format import (
    CHUNK,
    FLAT,
    FORM_SHIFT,
    HEAD_BYTES,
    LEVELLED,
    LEVELS,
    SIZE_MASK,
    STORED,
    STREAMS,
    TABLE_BYTES,
    FloatFormat,
    as_bits,
    field_bytes,
    format_of,
)
from gradwire.kernels.layout import ceil_div, expect_room, expect_size
from gradwire.kernels.prefix_code import MAX_WORD_BITS, NUM_SYMBOLS, PrefixCode
from gradwire.kernels.reference.bits import pack_bits, unpack_bits
from gradwire.kernels.reference.reduce import count_nonfinite


def exponent_counts(x: np.ndarray, counts: np.ndarray) -> None:
    """Add the frequency of each symbol to `counts`, int64[257]. The last counts what only an escape can represent."""
    form = format_of("exponent_counts", x)
    expect_size("exponent_counts", "counts", counts, NUM_SYMBOLS)
    for chunk in chunks_of(x):
        bits = as_bits(chunk)
        counts += np.bincount(symbols_of(bits, mean_exponent(bits, form), form), minlength=NUM_SYMBOLS)


def pack_floats(x: np.ndarray, code: PrefixCode, out: np.ndarray) -> tuple[int, bool]:
    """Pack x into `out`, uint8.

    `out` must hold as many bytes as x. Bytes past the returned length are unspecified.

    Returns:
        The number of bytes written, or -1 if x does not become shorter; and whether all of x is finite.
    """
    form = format_of("pack_floats", x)
    expect_room("pack_floats", x, out)
    chunks = [_pack_chunk(chunk, form, code) for chunk in chunks_of(x)]
    table = np.array([len(body) | kind << FORM_SHIFT for kind, body in chunks], "<u4").tobytes()
    packed = table + b"".join(body for _, body in chunks)
    return write_if_shorter(packed, x, out), count_nonfinite(x) == 0


def write_if_shorter(packed: bytes, x: np.ndarray, out: np.ndarray) -> int:
    """Write `packed` to `out` and return its length, or return -1 if x is not longer."""
    if len(packed) >= x.nbytes:
        return -1
    out[: len(packed)] = np.frombuffer(packed, np.uint8)
    return len(packed)


def unpack_floats(body: np.ndarray, code: PrefixCode, out: np.ndarray) -> bool:
    """Undo `pack_floats` into `out`; return False unless `body`, uint8, is a valid encoding of that many elements.

    Writes only to `out`, whatever the bytes are. After False, `out` is unspecified.
    """
    form = format_of("unpack_floats", out)
    table = TABLE_BYTES * form.chunks(out.size)
    if body.size < table or body.size >= out.nbytes:
        return False
    at = table
    for entry, chunk in zip(body[:table].copy().view("<u4").tolist(), chunks_of(out), strict=True):
        size = entry & SIZE_MASK
        if size > body.size - at:
            return False
        found = _unpack_chunk(bytes(body[at : at + size]), entry >> FORM_SHIFT, form, code, chunk.size)
        if found is None or _pack_chunk(found.view(out.dtype), form, code) != (
            entry >> FORM_SHIFT,
            bytes(body[at : at + size]),
        ):
            return False
        as_bits(chunk)[:] = found
        at += size
    return at == body.size


def packs_shorter(x: np.ndarray, code: PrefixCode) -> bool:
    """Whether `pack_floats` shortens x."""
    return pack_floats(x, code, np.empty(x.nbytes, np.uint8))[0] >= 0


def chunks_of(x: np.ndarray) -> list[np.ndarray]:
    return [x[start : start + CHUNK] for start in range(0, x.size, CHUNK)]


def exponents_of(bits: np.ndarray, form: FloatFormat) -> np.ndarray:
    """Exponents of elements, int64."""
    return (bits >> form.mantissa).astype(np.int64) & (form.exponents - 1)


def mean_exponent(bits: np.ndarray, form: FloatFormat) -> int:
    """Rounded mean of the exponents above 0, or 1 if there are none."""
    exponents = exponents_of(bits, form)
    count = int((exponents > 0).sum())
    return (int(exponents.sum()) + count // 2) // count if count else 1


def symbols_of(bits: np.ndarray, mean: int, form: FloatFormat) -> np.ndarray:
    exponents = exponents_of(bits, form)
    moved = (exponents + form.turn(mean) - 1) % (form.exponents - 1) + 1
    return np.where(exponents > 0, moved, np.where(bits != 0, form.special, 0))


# -- packing ---------------------------------------------------------------------------------------------------


def _pack_chunk(x: np.ndarray, form: FloatFormat, code: PrefixCode) -> tuple[int, bytes]:
    """The form of a chunk, and its bytes."""
    bits = as_bits(x)
    mean = mean_exponent(bits, form)
    streams = bytes([mean]) + pack_streams(symbols_of(bits, mean, form), code)
    kept = bits[bits != 0].astype(np.uint32)
    signed = (kept >> np.uint32(form.bits - 1)) << np.uint32(form.mantissa) | kept & np.uint32((1 << form.mantissa) - 1)
    levels = np.zeros(kept.size, np.uint8)
    for level in range(1, LEVELS):
        levels += kept & np.uint32((1 << level * form.step) - 1) == 0
    flat = pack_fields(signed, form.width(0))
    levelled = pack_fields(levels, 2)
    for level in range(LEVELS):
        levelled += pack_fields(signed[levels == level] >> np.uint32(level * form.step), form.width(level))
    kind, mantissas = (FLAT, flat) if len(flat) <= len(levelled) else (LEVELLED, levelled)
    packed = streams + mantissas
    return (kind, packed) if len(packed) < x.nbytes else (STORED, x.tobytes())


def pack_streams(symbols: np.ndarray, code: PrefixCode) -> bytes:
    share = ceil_div(symbols.size, STREAMS)
    lengths, streams = [], []
    for stream in range(STREAMS):
        value = length = 0
        for word in code.words[symbols[stream * share : (stream + 1) * share]].tolist():
            value |= (word & 0xFFFFFF) << length
            length += word >> 24
        lengths.append(length)
        streams.append(value.to_bytes(ceil_div(length, 8), "little"))
    return np.array(lengths, "<u2").tobytes() + b"".join(streams)


def pack_fields(values: np.ndarray, width: int) -> bytes:
    """Numbers of `width` bits, split into fields of 8, 4, 2 and 1 bits, low bits first."""
    values, fields = values.astype(np.uint32), []
    for field in [8] * (width >> 3) + [field for field in (4, 2, 1) if width & field]:
        out = np.empty(ceil_div(values.size * field, 8), np.uint8)
        pack_bits((values & np.uint32((1 << field) - 1)).astype(np.uint8), field, out)
        fields.append(out.tobytes())
        values = values >> np.uint32(field)
    return b"".join(fields)


# -- unpacking: the result is packed again and compared, so little is checked here ---------------------------------


def _unpack_chunk(body: bytes, kind: int, form: FloatFormat, code: PrefixCode, size: int) -> np.ndarray | None:
    dtype = np.uint32 if form.bits == 32 else np.uint16
    if kind == STORED:
        return np.frombuffer(body, dtype) if len(body) == size * form.bits // 8 else None
    streams = unpack_streams(body, code, size)
    if streams is None or kind > LEVELLED:
        return None
    symbols, at = streams
    kept = symbols != 0
    mantissas = _unpack_mantissas(body[at:], kind, form, int(kept.sum()))
    if mantissas is None:
        return None
    if not 1 <= body[0] < form.exponents or symbols[symbols != form.special].max(initial=0) >= form.exponents:
        return None
    moved = (symbols - form.turn(body[0]) - 1) % (form.exponents - 1) + 1
    exponents = np.where((symbols == form.special) | (symbols == 0), 0, moved)[kept].astype(np.uint32)
    sign, mantissa = mantissas >> np.uint32(form.mantissa), mantissas & np.uint32((1 << form.mantissa) - 1)
    bits = np.zeros(size, dtype)
    bits[kept] = sign << np.uint32(form.bits - 1) | exponents << np.uint32(form.mantissa) | mantissa
    return bits


def unpack_streams(body: bytes, code: PrefixCode, size: int) -> tuple[np.ndarray, int] | None:
    """The symbols, and the end of the streams."""
    if len(body) < HEAD_BYTES:
        return None
    symbols = np.zeros(size, np.int64)
    share, at = ceil_div(size, STREAMS), HEAD_BYTES
    words = {(word >> 24, word & 0xFFFFFF): symbol for symbol, word in enumerate(code.words.tolist())}
    for stream, length in enumerate(np.frombuffer(body, "<u2", STREAMS, 1).tolist()):
        end = at + ceil_div(length, 8)
        value, used = int.from_bytes(body[at:end], "little"), 0
        if end > len(body) or value >> length:
            return None
        for place in range(min(size, stream * share), min(size, (stream + 1) * share)):
            found = next(
                ((bits, words[key]) for bits in range(1, MAX_WORD_BITS + 1)
                 if (key := (bits, value >> used & (1 << bits) - 1)) in words),
                None,
            )  # fmt: skip
            if found is None:
                return None
            used += found[0]
            symbols[place] = found[1]
        if used != length:
            return None
        at = end
    return symbols, at


def _unpack_mantissas(body: bytes, kind: int, form: FloatFormat, count: int) -> np.ndarray | None:
    if kind == FLAT:
        return unpack_fields(body, form.width(0), count) if len(body) == field_bytes(count, form.width(0)) else None
    at = field_bytes(count, 2)
    if len(body) < at:
        return None
    levels = unpack_fields(body[:at], 2, count)
    signed = np.zeros(count, np.uint32)
    for level in range(LEVELS):
        chosen = levels == level
        size = field_bytes(int(chosen.sum()), form.width(level))
        if len(body) - at < size:
            return None
        values = unpack_fields(body[at : at + size], form.width(level), int(chosen.sum()))
        signed[chosen] = values << np.uint32(level * form.step)
        at += size
    return signed if at == len(body) else None


def unpack_fields(body: bytes, width: int, count: int) -> np.ndarray:
    """Undo `pack_fields`, to uint32."""
    values, at, shift = np.zeros(count, np.uint32), 0, 0
    for field in [8] * (width >> 3) + [field for field in (4, 2, 1) if width & field]:
        size = ceil_div(count * field, 8)
        plane = np.empty(count, np.uint8)
        unpack_bits(np.frombuffer(body, np.uint8, size, at), field, plane)
        values |= plane.astype(np.uint32) << np.uint32(shift)
        at, shift = at + size, shift + field
    return values
