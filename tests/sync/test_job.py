from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gradwire.sync.job import RANGE_ALIGNMENT, split


@given(count=st.integers(0, 1 << 34), num_parts=st.integers(1, 600))
def test_split_covers_every_element_once_at_aligned_edges(count: int, num_parts: int) -> None:
    parts = split(count, num_parts)
    assert len(parts) == num_parts
    assert parts[0].offset == 0
    assert parts[-1].offset + parts[-1].count == count
    for index, (part, following) in enumerate(itertools.pairwise(parts)):
        assert part.index == index
        assert part.offset + part.count == following.offset
        assert following.offset % RANGE_ALIGNMENT == 0 or following.count == 0
    counts = [part.count for part in parts]
    assert max(counts) - min(counts) <= 2 * RANGE_ALIGNMENT
