from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.compressors.base.registry import compressor_of
from gradwire.sync.chunk import RANGE_ALIGNMENT, split
from gradwire.sync.plan_entry import PlanEntry


@given(st.integers(0, 1 << 34), st.integers(1, 600), st.sampled_from([RANGE_ALIGNMENT, 4096, 1 << 20]))
def test_split_covers_every_element_once_at_aligned_edges(count: int, num_chunks: int, alignment: int) -> None:
    chunks = split(count, num_chunks, alignment)
    assert len(chunks) == num_chunks
    assert chunks[0].offset == 0
    assert chunks[-1].offset + chunks[-1].count == count
    for index, (chunk, following) in enumerate(itertools.pairwise(chunks)):
        assert chunk.index == index
        assert chunk.offset + chunk.count == following.offset
        assert following.offset % alignment == 0 or following.count == 0
    counts = [chunk.count for chunk in chunks]
    assert max(counts) - min(counts) <= 2 * alignment


@pytest.mark.parametrize(
    ("method", "alignment"),
    [("thc", 1024), ("thc:block=64", 1024), ("thc:block=4096", 4096), ("uthc:block=2048:rotate=none", 2048),
     ("thc:rotate=full", 1024), ("onebit", 1024)],
)  # fmt: skip
def test_ranges_begin_where_blocks_of_the_whole_tensor_do(method: str, alignment: int) -> None:
    entry = PlanEntry(compressor_of(method))
    assert entry.range_alignment == alignment
    assert [chunk.count for chunk in entry.chunks(3 * alignment + 5, shares=4)] == [alignment] * 3 + [5]


def test_tensors_that_are_needed_whole_are_not_cut() -> None:
    assert [chunk.count for chunk in PlanEntry(compressor_of("powersgd")).chunks(9000, shares=4)] == [9000]
