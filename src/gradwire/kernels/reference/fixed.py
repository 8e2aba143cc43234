"""Lossless compression of floats, fast rather than small: exponents in codes of four bits.

`pack_fixed` writes the chunk table, one uint32 per chunk, then the chunks. `kernels.fixed_format` describes a chunk.
"""

from __future__ import annotations

import numpy as np

from gradwire.kernels.fixed_format import (
    BELOW,
    CHUNK,
    CODE_BITS,
    ESCAPED,
    PERIOD,
    SAMPLED,
    TABLE_BYTES,
    largest_base,
    unescaped_bytes,
)
from gradwire.kernels.float_format import FloatFormat, as_bits, field_bytes, format_of
from gradwire.kernels.layout import expect_room
from gradwire.kernels.reference.floats import (
    exponents_of,
    mean_exponent,
    pack_fields,
    unpack_fields,
    write_if_shorter,
)
from gradwire.kernels.reference.reduce import count_nonfinite


def pack_fixed(x: np.ndarray, out: np.ndarray) -> tuple[int, bool]:
    """Pack x into `out`, uint8; see `pack_floats`."""
    form = format_of("pack_fixed", x)
    expect_room("pack_fixed", x, out)
    chunks = [_pack_chunk(as_bits(x[start : start + CHUNK]), form) for start in range(0, x.size, CHUNK)]
    packed = np.array([len(chunk) for chunk in chunks], "<u4").tobytes() + b"".join(chunks)
    return write_if_shorter(packed, x, out), count_nonfinite(x) == 0


def unpack_fixed(body: np.ndarray, out: np.ndarray) -> bool:
    """Undo `pack_fixed` into `out`; return False unless `body`, uint8, is a valid encoding of that many elements.

    Writes only to `out`, whatever the bytes are. After False, `out` is unspecified.
    """
    form, bits = format_of("unpack_fixed", out), as_bits(out)
    at = TABLE_BYTES * form.chunks(out.size)
    if not at <= body.size < out.nbytes:
        return False
    for size, start in zip(body[:at].copy().view("<u4").tolist(), range(0, out.size, CHUNK), strict=True):
        if size > body.size - at:
            return False
        packed, chunk = bytes(body[at : at + size]), bits[start : start + CHUNK]
        found = _unpack_chunk(packed, form, chunk)
        if found is None or _pack_chunk(found, form) != packed:
            return False
        chunk[:] = found
        at += size
    return at == body.size


def packs_shorter_fixed(x: np.ndarray) -> bool:
    """Whether `pack_fixed` shortens x."""
    return pack_fixed(x, np.empty(x.nbytes, np.uint8))[0] >= 0


def _pack_chunk(bits: np.ndarray, form: FloatFormat) -> bytes:
    exponents = exponents_of(bits, form)
    sample = bits[np.arange(bits.size) % PERIOD < SAMPLED]
    base = max(0, min(mean_exponent(sample, form) - BELOW, largest_base(form)))
    above = exponents - base
    codes = np.where(exponents == 0, 0, np.where((above > 0) & (above < ESCAPED), above, ESCAPED))
    signs, mantissas = bits >> (form.bits - 1), bits & ((1 << form.mantissa) - 1)
    packed = bytes([base]) + pack_fields(codes, CODE_BITS)
    packed += pack_fields(signs.astype(np.uint32) << form.mantissa | mantissas, form.width(0))
    packed += exponents[codes == ESCAPED].astype(np.uint8).tobytes()
    return packed if len(packed) < bits.nbytes else bits.tobytes()


def _unpack_chunk(body: bytes, form: FloatFormat, like: np.ndarray) -> np.ndarray | None:
    """The bits of as many elements as `like` has. They are packed again and compared, so little is checked here."""
    size = like.size
    if len(body) == like.nbytes:
        return np.frombuffer(body, like.dtype)
    if len(body) < unescaped_bytes(size, form):
        return None
    at = 1 + field_bytes(size, CODE_BITS)
    codes = unpack_fields(body[1:at], CODE_BITS, size).astype(np.int64)
    signed = unpack_fields(body[at:], form.width(0), size)
    escaped = np.frombuffer(body, np.uint8, offset=unescaped_bytes(size, form))
    exponents = np.where(codes == 0, 0, body[0] + codes)
    if (codes == ESCAPED).sum() != escaped.size:
        return None
    exponents[codes == ESCAPED] = escaped
    signs, mantissas = signed >> form.mantissa, signed & ((1 << form.mantissa) - 1)
    return (signs << (form.bits - 1) | exponents << form.mantissa | mantissas).astype(like.dtype)
