"""The element types of payloads, and how arrays are packed into bytes.

An array is packed in chunks of `CHUNK` elements (`TRIT_CHUNK` for trits), so that elements, random numbers and bytes
are visited in the same order in one sweep. Chunks of S bytes are *planar*: byte i holds elements i, i + S, i + 2 S, ...
from its least significant bits up. Packing is then shifts and ors of whole vectors. uint1 is packed in the order of
elements, bit i % 8 of byte i // 8, which is the result of a vector comparison. Five trits share a byte, also planar;
the first plane is the most significant digit. Only the last byte of an array has padding: bits of 0, digits of value 0.

Source: HiPress (Bai et al. 2021), section 4.3, types and packing; 3LC (Lim et al. 2019), section 3.2, trits.
Differences: planar order within chunks instead of consecutive bits.
"""
# Shapes: N = elements of an array, S = bytes of a chunk

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gradwire.kernels.layout import RANDOM16_GROUP, TERNARY_DIGITS, ceil_div

CHUNK = RANDOM16_GROUP
TRIT_CHUNK = TERNARY_DIGITS * CHUNK

Packing = Literal["bits", "planes", "digits", "raw"]


@dataclass(frozen=True)
class ElementType:
    """An element type.

    Attributes:
        name: Name in the language.
        packing: Layout of an array.
        bits: Bits per element; 8/5 for a trit.
        storage: NumPy dtype of the packed bytes, or of the elements of a raw array.
        low, high: Range of integers, ends included. Values outside are clamped. NaN becomes `low`, or 0 if the type has
            negative values.
        largest: Largest magnitude of floats. Values beyond are clamped. NaN becomes 0.
    """

    name: str
    packing: Packing
    bits: float
    storage: np.dtype
    low: int = 0
    high: int = 0
    largest: float = 0.0

    @property
    def is_integer(self) -> bool:
        return self.high > 0

    @property
    def chunk(self) -> int:
        """Elements per chunk."""
        return TRIT_CHUNK if self.packing == "digits" else CHUNK

    @property
    def per_byte(self) -> int:
        """Elements per byte; 1 if an element takes one byte or more."""
        return TERNARY_DIGITS if self.packing == "digits" else max(1, int(8 // self.bits))

    def num_bytes(self, size: int) -> int:
        """Bytes of an array of `size` elements."""
        return size * self.storage.itemsize if self.bits >= 8 else ceil_div(size, self.per_byte)

    def __repr__(self) -> str:
        return self.name


def _integer(name: str, packing: Packing, bits: float, low: int, high: int, storage: type = np.uint8) -> ElementType:
    return ElementType(name, packing, bits, np.dtype(storage), low, high)


uint1 = _integer("uint1", "bits", 1, 0, 1)
uint2 = _integer("uint2", "planes", 2, 0, 3)
uint4 = _integer("uint4", "planes", 4, 0, 15)
uint8 = _integer("uint8", "planes", 8, 0, 255)
int8 = _integer("int8", "raw", 8, -127, 127, np.int8)
int32 = _integer("int32", "raw", 32, -(2**31) + 128, 2**31 - 128, np.int32)
uint32 = _integer("uint32", "raw", 32, 0, 2**32 - 256, np.uint32)
trit = _integer("trit", "digits", 8 / TERNARY_DIGITS, -1, 1)
float32 = ElementType("float32", "raw", 32, np.dtype(np.float32), largest=2.0**128 - 2.0**104)
float16 = ElementType("float16", "raw", 16, np.dtype(np.float16), largest=65504.0)
bfloat16 = ElementType("bfloat16", "raw", 16, np.dtype(np.uint16), largest=2.0**128 - 2.0**120)

TYPES = {each.name: each for each in (
    uint1, uint2, uint4, uint8, int8, int32, uint32, trit, float32, float16, bfloat16
)}  # fmt: skip
