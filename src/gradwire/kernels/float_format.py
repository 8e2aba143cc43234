"""The parts of a float, and the layout of a chunk of floats. Shared by both backends of `pack_floats`.

A chunk of up to `CHUNK` elements consists of a head, streams, and mantissas:

- Head: the rounded mean of the exponents above 0 (1 if there are none), uint8, then the length in bits of each of
  `STREAMS` streams, uint16.
- Streams: each holds the code words of one eighth of the elements, in order, padded to whole bytes. Symbol 0 means +0,
  of which nothing more is sent. An exponent above 0 is rotated so that the mean becomes `center`: one code then fits
  tensors of any magnitude. -0 and subnormal numbers are `special`: a symbol of their own if the element type has one to
  spare, else 0 after an escape.
- Mantissas: signs and mantissas of all elements except +0, in one of two forms. The flat form keeps all bits. The
  levelled form sends a level of two bits for each element, then the elements of each level in order, without the last
  level · step bits, which are 0. Numbers are split into fields of 8, 4, 2 and 1 bits, low bits first, and each field is
  packed as in `pack_bits`. Padding is zeros.

The encoding is unique: an element has the highest level possible, a chunk the shorter form (flat if they are equal). A
chunk that packing would not shorten is stored unchanged.

Source: GCOMP (SoCC 2024), sections 4 to 6 and figure 7. Differences: the exponent is coded by its distance from the
chunk's mean; levels are packed separately from mantissas; subnormal numbers are kept; a chunk has eight streams, and
its offset and count follow from the receiver's spec.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradwire.kernels.layout import ceil_div

CHUNK = 16384
STREAMS = 8
HEAD_BYTES = 1 + 2 * STREAMS
LEVELS = 4

# An entry of the chunk table: the chunk's bytes, and its form in the upper bits.
TABLE_BYTES = 4
FORM_SHIFT = 30
SIZE_MASK = (1 << FORM_SHIFT) - 1
STORED, FLAT, LEVELLED = range(3)


class FloatFormat(NamedTuple):
    """Format of an element type.

    Attributes:
        bits: Bits per element.
        mantissa: Bits of the mantissa.
        exponents: Number of different exponents.
        special: Symbol of -0 and of subnormal numbers; 256 stands for 0 after an escape.
        step: Bits of the mantissa that each level removes.
        center: Symbol of the mean exponent.
    """

    bits: int
    mantissa: int
    exponents: int
    special: int
    step: int
    center: int

    @property
    def least_exponent(self) -> int:
        """Binary exponent of the smallest normal number."""
        return 2 - self.exponents // 2

    def width(self, level: int) -> int:
        """Bits of sign and mantissa at this level."""
        return 1 + self.mantissa - level * self.step

    def turn(self, mean: int) -> int:
        """Offset from an exponent above 0 to its symbol. Values from `exponents` on wrap around to 1."""
        return (self.center - mean) % (self.exponents - 1)

    def chunks(self, size: int) -> int:
        """Number of chunks of `size` elements."""
        return ceil_div(size, CHUNK)


# By the dtype of the array; uint16 holds the bits of bfloat16.
FORMATS = {
    np.dtype(np.float32): FloatFormat(32, 23, 256, 256, 6, 128),
    np.dtype(np.uint16): FloatFormat(16, 7, 256, 256, 2, 128),
    np.dtype(np.float16): FloatFormat(16, 10, 32, 32, 3, 20),
}


def format_of(kernel: str, x: np.ndarray) -> FloatFormat:
    """Format of the elements of an array."""
    if x.dtype not in FORMATS:
        raise TypeError(f"Expected float32, float16 or uint16 (bfloat16 bits), got {x.dtype} (in {kernel}).")
    return FORMATS[x.dtype]


def as_bits(x: np.ndarray) -> np.ndarray:
    """View of the elements as unsigned integers."""
    return x.view(np.uint32 if x.dtype.itemsize == 4 else np.uint16)


def field_bytes(count: int, width: int) -> int:
    """Bytes of `count` numbers of `width` bits."""
    size = (width >> 3) * count
    for field in (4, 2, 1):
        if width & field:
            size += ceil_div(count * field, 8)
    return size
