"""How a range is cut into blocks that are rotated, and how indices into a table lie in a payload.

A block is a power of two of elements. What is left at the end is a block of its own, filled up with zeros to the next
power of two where blocks are rotated, and as long as it is where they are not. Indices are packed in chunks of 1,024,
which are whole packets: planar within a chunk, as `pack_bits` does it; for widths that are no power of two one plane
set for each power of two in them, the largest first and from the least significant bits up.
"""
# Shapes: N elements of the range, P = N with the last block filled up, B elements a block

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradwire.kernels.layout import ceil_div

INDEX_CHUNK = 1024
MAX_INDEX_BITS = 8
SIGNS_A_WORD = 32


class BlockLayout(NamedTuple):
    """A range in blocks.

    Attributes:
        size: N.
        block: B; a power of two of at least 64.
        rotated: whether blocks are rotated: signs flipped, then the Hadamard transform.
        signs: random uint32 words, of which element i has the bit `shift` + i, lowest first; a set bit flips its sign.
            At least `num_sign_words`; empty unless rotated.
        shift: below 32.
    """

    size: int
    block: int
    rotated: bool
    signs: np.ndarray
    shift: int

    @property
    def num_blocks(self) -> int:
        return ceil_div(self.size, self.block)

    @property
    def padded(self) -> int:
        """P."""
        return padded_size(self.size, self.block, self.rotated)

    @property
    def work_size(self) -> int:
        """Elements that are worked on at a time: whole blocks, and whole chunks."""
        return min(max(self.block, INDEX_CHUNK), self.padded)

    def lengths(self) -> np.ndarray:
        """Elements of each block, the zeros of the last one included: int64[num_blocks]."""
        found = np.full(self.num_blocks, self.block, np.int64)
        if found.size:
            found[-1] = self.padded - self.block * (self.num_blocks - 1)
        return found


def padded_size(size: int, block: int, rotated: bool) -> int:
    """P: how many elements the blocks have."""
    rest = size % block
    return size - rest + (next_power(rest) if rotated and rest else rest)


def next_power(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << max(0, size - 1).bit_length()


def num_sign_words(padded: int) -> int:
    """Words of signs for so many elements; a few more than needed, for loads of 64 bits anywhere."""
    return padded // SIGNS_A_WORD + 4


def widths(bits: int) -> list[int]:
    """The powers of two that a width is the sum of, the largest first."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def index_bytes(count: int, bits: int) -> int:
    """Bytes of so many packed indices."""
    rest = count % INDEX_CHUNK
    tail = sum(ceil_div(rest * width, 8) for width in widths(bits))
    return count // INDEX_CHUNK * (INDEX_CHUNK // 8 * bits) + tail


def expect_index_bits(kernel: str, bits: int, table: np.ndarray) -> None:
    """Raise unless a table has an entry for every index."""
    if not 1 <= bits <= MAX_INDEX_BITS or table.size != 1 << bits:
        raise ValueError(f"Expected a table of 2^bits values, got {table.size} for {bits} bits (in {kernel}).")
