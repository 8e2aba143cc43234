"""Layout of a chunk of floats whose exponents have codes of four bits. Shared by both backends of `pack_fixed`.

A chunk of up to `CHUNK` elements consists of a base, codes, signs and mantissas, and escaped exponents:

- Base, uint8: `BELOW` less than the rounded mean of the exponents above 0 of some elements, within bounds: of the
  first `SAMPLED` of every `PERIOD`. Without such exponents the mean is 1.
- Codes: 0 for exponent 0, 1 to 14 for the exponents above the base, 15 for all others. Packed as in `pack_bits`.
- Signs and mantissas of all elements, in fields as in `float_format`.
- The exponents of elements with code 15, uint8, in order. Those of infinities and NaN are always among them.

A chunk that packing would not shorten is stored unchanged. The encoding is unique.

Source: gradwire. Fourteen exponents in a row hold nearly all of a Gaussian; of gradients of the text workload, 0.1 to
0.3 % are escaped.
"""

from __future__ import annotations

from gradwire.kernels.float_format import CHUNK, FloatFormat, field_bytes

__all__ = [
    "BELOW",
    "CHUNK",
    "CODE_BITS",
    "ESCAPED",
    "PERIOD",
    "SAMPLED",
    "TABLE_BYTES",
    "largest_base",
    "unescaped_bytes",
]

CODE_BITS = 4
ESCAPED = (1 << CODE_BITS) - 1
BELOW = 9
"""From the base to the mean. Exponents of a gradient reach further below their mean than above it."""

SAMPLED, PERIOD = 64, 512
"""All exponents would give nearly the same mean, for an eighth of the time that a chunk takes."""

TABLE_BYTES = 4
"""Bytes of an entry of the chunk table, the size of a chunk in bytes."""


def largest_base(form: FloatFormat) -> int:
    """The largest base: the exponent of infinities and NaN has no code."""
    return form.exponents - 1 - ESCAPED


def unescaped_bytes(size: int, form: FloatFormat) -> int:
    """Bytes of a packed chunk of `size` elements without escaped exponents."""
    return 1 + field_bytes(size, CODE_BITS) + field_bytes(size, form.width(0))
