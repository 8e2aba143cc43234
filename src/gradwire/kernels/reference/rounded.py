"""Floats rounded to margins that both ends know, in as many bits as the margins leave.

A margin is the binary exponent of a change that does not matter: uint8, biased as in float32, 0 for none. An element
of finite exponent e with a margin of E loses the last n = E − max(e, 1) + 1 bits of its m-bit mantissa (at least 0, at
most `most`), to nearest, so it changes by at most 2^(E − m) without the bias. With the largest finite exponent it loses
one less, so that this also holds for elements that are truncated because rounding would make them infinite. Since e is
sent, a reader that has the margins knows n, and n need not be sent.

Layout: as `pack_floats`, but the mantissas of a chunk have one form: sign and kept bits of each element except +0, in
element order, 1 + m − n bits each, the sign lowest, read from the least significant bit of each byte; then zeros up to
the next byte.

Source: GCOMP (SoCC 2024), section 5. Differences: elements lose any number of bits, not one of four; they are rounded,
not truncated; nothing says how many.
"""
# Shapes: N elements

from __future__ import annotations

import numpy as np

from gradwire.kernels.float_format import (
    FLAT,
    FORM_SHIFT,
    SIZE_MASK,
    STORED,
    TABLE_BYTES,
    FloatFormat,
    as_bits,
    format_of,
)
from gradwire.kernels.layout import expect_room, expect_size
from gradwire.kernels.prefix_code import PrefixCode
from gradwire.kernels.reference.floats import (
    chunks_of,
    exponents_of,
    mean_exponent,
    pack_streams,
    symbols_of,
    unpack_streams,
    write_if_shorter,
)

_LARGEST = np.finfo(np.float32).max


def margins_of(limits: np.ndarray, guard: float, out: np.ndarray) -> None:
    """Write the exponent of limit / guard: the largest 2^E below it. 0 for NaN, subnormal and negative quotients.

    An infinite limit, which may be the overflow of a finite one, counts as the largest float.

    Args:
        limits: float32[N], from `update_limits`.
        guard: Safety factor. The reciprocal is rounded to float32.
        out: uint8[N].
    """
    expect_size("margins_of", "out", out, limits.size)
    with np.errstate(all="ignore"):
        quotients = np.where(limits > _LARGEST, _LARGEST, limits) * np.float32(1 / guard)
    out[:] = np.where(quotients > 0, quotients.view(np.uint32) >> 23 & 0xFF, 0)


def round_floats(x: np.ndarray, margins: np.ndarray, most: int, out: np.ndarray) -> None:
    """Write x rounded to its margins, ties to even.

    An element that would become infinite is truncated instead. One that becomes 0 by losing bits is +0. NaN and
    infinities are unchanged.

    Args:
        x: float32, float16 or uint16 (bfloat16 bits).
        margins: uint8[N].
        most: Most bits that an element may lose, up to those of a mantissa.
        out: Same type as x; may be x.
    """
    form = format_of("round_floats", x)
    expect_size("round_floats", "margins", margins, x.size)
    expect_size("round_floats", "out", out, x.size)
    bits = as_bits(x).astype(np.int64)
    lost = _lost(as_bits(x), margins, most, form)
    sign, infinity = 1 << (form.bits - 1), (form.exponents - 1) << form.mantissa
    magnitude = bits & (sign - 1)
    rounded = magnitude + ((1 << lost) - 1 >> 1) + np.where(lost > 0, magnitude >> lost & 1, 0) >> lost << lost
    rounded = np.where(rounded >= infinity, magnitude >> lost << lost, rounded)
    as_bits(out)[:] = np.where((lost > 0) & (rounded == 0), 0, bits & sign | rounded)


def pack_rounded(x: np.ndarray, margins: np.ndarray, most: int, code: PrefixCode, out: np.ndarray) -> int:
    """Pack x, which `round_floats` has rounded, into `out`, uint8; return the bytes written, or -1 as `pack_floats`."""
    form = format_of("pack_rounded", x)
    expect_size("pack_rounded", "margins", margins, x.size)
    expect_room("pack_rounded", x, out)
    pairs = zip(chunks_of(x), chunks_of(margins), strict=True)
    chunks = [_pack_chunk(as_bits(chunk), part, most, form, code) for chunk, part in pairs]
    table = np.array([len(body) | kind << FORM_SHIFT for kind, body in chunks], "<u4").tobytes()
    packed = table + b"".join(body for _, body in chunks)
    return write_if_shorter(packed, x, out)


def unpack_rounded(body: np.ndarray, margins: np.ndarray, most: int, code: PrefixCode, out: np.ndarray) -> bool:
    """Undo `pack_rounded` into `out`; see `unpack_floats`."""
    form = format_of("unpack_rounded", out)
    expect_size("unpack_rounded", "margins", margins, out.size)
    table = TABLE_BYTES * form.chunks(out.size)
    if body.size < table or body.size >= out.nbytes:
        return False
    at = table
    entries = body[:table].copy().view("<u4").tolist()
    for entry, chunk, part in zip(entries, chunks_of(out), chunks_of(margins), strict=True):
        size, kind = entry & SIZE_MASK, entry >> FORM_SHIFT
        data = bytes(body[at : at + size])
        if size > body.size - at:
            return False
        found = _unpack_chunk(data, kind, part, most, form, code)
        if found is None:
            return False
        again = np.empty_like(found)
        round_floats(found.view(out.dtype), part, most, again.view(out.dtype))
        if (again != found).any() or _pack_chunk(found, part, most, form, code) != (kind, data):
            return False
        as_bits(chunk)[:] = found
        at += size
    return at == body.size


def _lost(bits: np.ndarray, margins: np.ndarray, most: int, form: FloatFormat) -> np.ndarray:
    """Number of bits that each element loses."""
    bias = 127 - (form.exponents // 2 - 1)
    exponents = exponents_of(bits, form)
    lost = np.clip(margins.astype(np.int64) - bias - np.maximum(exponents, 1) + 1, 0, most)
    lost = np.where(exponents == form.exponents - 2, np.maximum(lost, 1) - 1, lost)
    return np.where(exponents == form.exponents - 1, 0, lost)


def _pack_chunk(
    bits: np.ndarray, margins: np.ndarray, most: int, form: FloatFormat, code: PrefixCode
) -> tuple[int, bytes]:
    """The form of a chunk, and its bytes."""
    mean = mean_exponent(bits, form)
    packed = bytes([mean]) + pack_streams(symbols_of(bits, mean, form), code)
    lost, kept = _lost(bits, margins, most, form), bits != 0
    signed = (bits.astype(np.int64) & (1 << form.mantissa) - 1) >> lost << 1 | bits >> (form.bits - 1)
    value = used = 0
    for each, width in zip(signed[kept].tolist(), (1 + form.mantissa - lost)[kept].tolist(), strict=True):
        value |= each << used
        used += width
    packed += value.to_bytes((used + 7) // 8, "little")
    return (FLAT, packed) if len(packed) < bits.nbytes else (STORED, bits.tobytes())


def _unpack_chunk(
    body: bytes, kind: int, margins: np.ndarray, most: int, form: FloatFormat, code: PrefixCode
) -> np.ndarray | None:
    """The bits of a chunk. The result is packed again and compared, so little is checked here."""
    dtype = np.uint32 if form.bits == 32 else np.uint16
    if kind == STORED:
        return np.frombuffer(body, dtype) if len(body) == margins.size * form.bits // 8 else None
    streams = unpack_streams(body, code, margins.size)
    if streams is None or kind != FLAT or not 1 <= body[0] < form.exponents:
        return None
    symbols, at = streams
    if symbols[symbols != form.special].max(initial=0) >= form.exponents:
        return None
    moved = (symbols - form.turn(body[0]) - 1) % (form.exponents - 1) + 1
    exponents = np.where((symbols == form.special) | (symbols == 0), 0, moved)
    bits = (exponents << form.mantissa).astype(dtype)
    lost = _lost(bits, margins, most, form)
    value = int.from_bytes(body[at:], "little")
    for place in np.flatnonzero(symbols).tolist():
        width = 1 + form.mantissa - int(lost[place])
        signed = value & (1 << width) - 1
        bits[place] |= dtype((signed & 1) << form.bits - 1 | signed >> 1 << int(lost[place]))
        value >>= width
    return bits
