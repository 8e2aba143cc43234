"""Chunks: the ranges that a tensor or a fusion group is cut into. One payload encodes one chunk."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

# Chunks begin at multiples of this many elements, or of a compressor's larger alignment, so that no group of random
# numbers (1,024 each) and no block of a codec is cut.
RANGE_ALIGNMENT = 1024


@dataclass(frozen=True)
class Chunk:
    """One range of a job.

    Attributes:
        index: Index of the chunk in the job; the partition field of its frames.
        offset: Index of the first value within the job.
        count: Number of values.
    """

    index: int
    offset: int
    count: int

    @property
    def slice(self) -> slice:
        return slice(self.offset, self.offset + self.count)


def split(count: int, num_chunks: int, alignment: int = RANGE_ALIGNMENT) -> list[Chunk]:
    """Split `count` elements into `num_chunks` chunks of nearly equal length. Some may be empty.

    Depends only on its arguments, so that all ranks split in the same way.
    """
    blocks = -(-count // alignment)
    edges = [min(count, blocks * index // num_chunks * alignment) for index in range(num_chunks + 1)]
    return [Chunk(index, start, end - start) for index, (start, end) in enumerate(itertools.pairwise(edges))]
