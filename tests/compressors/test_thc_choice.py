"""The rule that chooses bits, granularity and lanes for a number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.compressors.thc_choice import choose, lane_for, paper_error
from gradwire.compressors.thc_tables import optimal
from gradwire.core.errors import OptionError

P = 1 / 32


@given(st.integers(1, 1 << 20), st.integers(1, 1023))
def test_lanes_are_the_narrowest_that_hold_the_sum(world_size: int, granularity: int) -> None:
    lane = lane_for(world_size, granularity)
    assert world_size * granularity <= np.iinfo(lane).max
    narrower = {2: np.uint8, 4: np.uint16}.get(lane.itemsize)
    assert narrower is None or world_size * granularity > np.iinfo(narrower).max


def test_eight_ranks_fit_8_bits_at_granularity_30_and_nine_do_not() -> None:
    assert lane_for(8, 30) == np.uint8
    assert lane_for(9, 30) == np.uint16
    assert lane_for(8, 30, 8) == np.uint8
    with pytest.raises(OptionError, match="lane_bits=16, or a granularity of at most 28, or leave both"):
        lane_for(9, 30, 8)
    with pytest.raises(OptionError, match="Do: pass a granularity of at most 3, or leave"):
        lane_for(1 << 30, 30)
    assert lane_for(2, 3, 32) == np.uint32


@given(st.integers(1, 3000), st.integers(1, 4))
def test_a_choice_fits_and_is_as_good_as_the_papers_wherever_one_is(world_size: int, bits: int) -> None:
    table, lane = choose(world_size, bits, P)
    assert table.bits <= bits
    assert world_size * table.granularity <= np.iinfo(lane).max
    assert table == optimal(table.bits, table.granularity, P)
    best = min(optimal(bits, least, P).cost for least in (2**bits - 1, 4 * 2**bits - 1))
    if best / world_size <= paper_error(P):
        assert table.cost / world_size <= paper_error(P)
    else:
        assert table.bits == bits


def test_bits_on_the_way_fall_with_the_ranks() -> None:
    """4 bits and lanes of 8 up to 17 ranks; wider lanes, and then fewer bits, where the error of the mean allows it."""
    found = {n: choose(n, 4, P) for n in (2, 8, 17, 18, 64, 256)}
    shape = {n: (table.bits, lane.itemsize) for n, (table, lane) in found.items()}
    assert shape == {2: (4, 1), 8: (4, 1), 17: (4, 1), 18: (4, 2), 64: (3, 2), 256: (2, 2)}
    assert found[17].table.granularity == 15
    assert found[8].table.cost <= optimal(4, 30, P).cost


def test_lanes_that_are_asked_for_are_kept_to() -> None:
    table, lane = choose(18, 4, P, 8)
    assert (table.bits, lane) == (3, np.uint8)
    assert choose(8, 4, P, 16).lane == np.uint16
    assert choose(255, 4, P, 8).table.values == (0, 1)
    with pytest.raises(OptionError, match="leave lane_bits to be chosen"):
        choose(256, 4, P, 8)
