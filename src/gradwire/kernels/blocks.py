"""How a range is divided into rotated blocks, and how indices into a table are packed. Shared by all backends.

The length of a block is a power of two. Rotation pads a shorter last block with zeros to the next power of two;
without rotation it keeps its length. Indices are packed in chunks of 1,024, so that a packet holds whole chunks. Within
a chunk they are planar, as in `pack_bits`. An index width that is no power of two is split into powers of two, the
largest first, from the least significant bits up; each gets planes of its own.
"""
# Shapes: N elements of the range, P = N with the last block padded, B elements per block, G blocks

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradwire.kernels.layout import ceil_div, expect_size

INDEX_CHUNK = 1024
MAX_INDEX_BITS = 8
SIGNS_A_WORD = 32


class BlockLayout(NamedTuple):
    """A range divided into blocks.

    Attributes:
        size: N.
        block: B, a power of two, at least 64.
        rotated: Whether blocks are rotated: random sign flips, then the Hadamard transform.
        signs: Random words, uint32, at least `num_sign_words`; empty unless rotated. Bit `shift` + i, counted from the
            least significant, flips the sign of element i.
        shift: First bit of `signs` that is used, below 32.
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
        """P, the number of elements with padding."""
        return padded_size(self.size, self.block, self.rotated)

    @property
    def work_size(self) -> int:
        """Elements processed at a time: whole blocks and whole chunks."""
        return min(max(self.block, INDEX_CHUNK), self.padded)

    def lengths(self) -> np.ndarray:
        """Elements of each block, with padding: int64[G]."""
        found = np.full(self.num_blocks, self.block, np.int64)
        if found.size:
            found[-1] = self.padded - self.block * (self.num_blocks - 1)
        return found


def padded_size(size: int, block: int, rotated: bool) -> int:
    """P: the number of elements in all blocks, with padding."""
    rest = size % block
    return size - rest + (next_power(rest) if rotated and rest else rest)


def next_power(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


def num_sign_words(padded: int) -> int:
    """Words of signs for `padded` elements, with a few extra so that 64 bits can be loaded anywhere."""
    return padded // SIGNS_A_WORD + 4


def widths(bits: int) -> list[int]:
    """The powers of two that add up to `bits`, the largest first."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def index_bytes(count: int, bits: int) -> int:
    """Bytes of `count` packed indices."""
    rest = count % INDEX_CHUNK
    tail = sum(ceil_div(rest * width, 8) for width in widths(bits))
    return count // INDEX_CHUNK * (INDEX_CHUNK // 8 * bits) + tail


def expect_blocks(kernel: str, blocks: BlockLayout, size: int, work: np.ndarray, *per_block: np.ndarray) -> None:
    """Raise unless the layout and the buffers fit `size` elements."""
    if blocks.size != size:
        raise ValueError(f"Expected blocks of {size} elements, got {blocks.size} (in {kernel}).")
    if blocks.rotated and blocks.signs.size < num_sign_words(blocks.padded):
        raise ValueError(f"Expected signs of {blocks.padded} elements, got {blocks.signs.size} words (in {kernel}).")
    expect_size(kernel, "work", work, blocks.work_size)
    for array in per_block:
        expect_size(kernel, "values of blocks", array, blocks.num_blocks)


def expect_index_bits(kernel: str, bits: int, table: np.ndarray) -> None:
    """Raise unless the table has an entry for every index."""
    if not 1 <= bits <= MAX_INDEX_BITS or table.size != 1 << bits:
        raise ValueError(f"Expected a table of 2^bits values, got {table.size} for {bits} bits (in {kernel}).")
