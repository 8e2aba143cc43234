from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gradwire.sync.chunk import RANGE_ALIGNMENT, split


@given(count=st.integers(0, 1 << 34), num_chunks=st.integers(1, 600))
def test_split_covers_every_element_once_at_aligned_edges(count: int, num_chunks: int) -> None:
    chunks = split(count, num_chunks)
    assert len(chunks) == num_chunks
    assert chunks[0].offset == 0
    assert chunks[-1].offset + chunks[-1].count == count
    for index, (chunk, following) in enumerate(itertools.pairwise(chunks)):
        assert chunk.index == index
        assert chunk.offset + chunk.count == following.offset
        assert following.offset % RANGE_ALIGNMENT == 0 or following.count == 0
    counts = [chunk.count for chunk in chunks]
    assert max(counts) - min(counts) <= 2 * RANGE_ALIGNMENT
