"""The parts of a float, and how a chunk of them is laid out: what both backends of `pack_floats` share.

A chunk of up to `CHUNK` elements begins with the mean of its exponents, uint8, rounded, of elements that have one above
0, else 1; the lengths in bits of each of `STREAMS` streams, uint16; and the streams, each of whole bytes: the words of
the symbols of one eighth of the elements, in order.

Symbol 0 stands for +0, of which nothing more is sent. The symbol of an exponent above 0 is that exponent, moved round
so that the mean falls on `center`: then one code fits tensors of any magnitude. -0 and subnormal numbers are `special`:
another symbol where the element type has one to spare, else 0 sent after an escape.

Signs and mantissas of all elements but +0 follow, in one of two forms. Flat: all bits of them. Levelled: two bits an
element, its level, then the elements of each level in order, without the last level · step bits, which are 0. Numbers
of so many bits are cut into fields of 8, 4, 2 and 1, low bits first; each field is packed like `pack_bits`. All that
is filled up with is zeros.

Each element has the highest level that it can have, and a chunk the form that is shorter, flat if both are. A chunk
that would not be shorter than its elements is stored as they are. So every tensor has one encoding.

Source: GCOMP (SoCC 2024), sections 4 to 6 and figure 7. Differences: the exponent is coded by its distance from the
chunk's mean; levels are packed apart and not strewn among mantissas; subnormal numbers are kept; a chunk has eight
streams, and no offset and count of its own, which follow from the receiver's spec.
"""
# Shapes: N elements

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradwire.kernels.layout import ceil_div

CHUNK = 16384
STREAMS = 8
HEAD_BYTES = 1 + 2 * STREAMS
LEVELS = 4

# A word of the chunk table: bytes of the chunk, and its form above.
TABLE_BYTES = 4
FORM_SHIFT = 30
SIZE_MASK = (1 << FORM_SHIFT) - 1
STORED, FLAT, LEVELLED = range(3)


class FloatFormat(NamedTuple):
    """An element type.

    Attributes:
        bits: of an element.
        mantissa: bits of its mantissa.
        exponents: how many exponents there are.
        special: the symbol of -0 and of subnormal numbers; 256 for 0 after an escape.
        step: bits that a level takes off the mantissa.
        center: the symbol of the mean exponent.
    """

    bits: int
    mantissa: int
    exponents: int
    special: int
    step: int
    center: int

    @property
    def least_exponent(self) -> int:
        """Binary exponent of the smallest number that is not subnormal."""
        return 2 - self.exponents // 2

    def width(self, level: int) -> int:
        """Bits of sign and mantissa at a level."""
        return 1 + self.mantissa - level * self.step

    def turn(self, mean: int) -> int:
        """What is added to an exponent above 0 to get its symbol; from `exponents` on it starts anew at 1."""
        return (self.center - mean) % (self.exponents - 1)

    def chunks(self, size: int) -> int:
        """How many chunks so many elements make."""
        return ceil_div(size, CHUNK)


# By the type of the array that holds the elements; uint16 stands for the bits of bfloat16.
FORMATS = {
    np.dtype(np.float32): FloatFormat(32, 23, 256, 256, 6, 128),
    np.dtype(np.uint16): FloatFormat(16, 7, 256, 256, 2, 128),
    np.dtype(np.float16): FloatFormat(16, 10, 32, 32, 3, 20),
}


def format_of(kernel: str, x: np.ndarray) -> FloatFormat:
    """The format of an array's elements."""
    if x.dtype not in FORMATS:
        raise TypeError(f"Expected float32, float16 or uint16 (bfloat16 bits), got {x.dtype} (in {kernel}).")
    return FORMATS[x.dtype]


def as_bits(x: np.ndarray) -> np.ndarray:
    """The elements as unsigned integers, the same memory."""
    return x.view(np.uint32 if x.dtype.itemsize == 4 else np.uint16)


def field_bytes(count: int, width: int) -> int:
    """Bytes of `count` numbers of `width` bits."""
    size = (width >> 3) * count
    for field in (4, 2, 1):
        if width & field:
            size += ceil_div(count * field, 8)
    return size
