"""The rule that chooses bits, granularity and lanes for a number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.compressors.support.thc_choice import CLAMPED, accumulator_for, choose, choose_p
from gradwire.compressors.support.thc_tables import clamping_error, optimal
from gradwire.core.errors import OptionError

P = 1 / 32


@given(st.integers(1, 1 << 20), st.integers(1, 1023))
def test_lanes_are_the_narrowest_that_hold_the_sum(world_size: int, granularity: int) -> None:
    lane = accumulator_for(world_size, granularity)
    assert world_size * granularity <= np.iinfo(lane).max
    narrower = {2: np.uint8, 4: np.uint16}.get(lane.itemsize)
    assert narrower is None or world_size * granularity > np.iinfo(narrower).max


def test_eight_ranks_fit_8_bits_at_granularity_30_and_nine_do_not() -> None:
    assert accumulator_for(8, 30) == np.uint8
    assert accumulator_for(9, 30) == np.uint16
    assert accumulator_for(8, 30, 8) == np.uint8
    with pytest.raises(OptionError, match="accumulator_bits=16, or a granularity of at most 28, or leave both"):
        accumulator_for(9, 30, 8)
    with pytest.raises(OptionError, match="Pass a granularity of at most 3, or leave"):
        accumulator_for(1 << 30, 30)
    assert accumulator_for(2, 3, 32) == np.uint32


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_no_table_of_so_many_bits_that_fits_the_narrowest_lanes_is_better_by_half_a_percent(bits: int) -> None:
    evenly_spaced, finest = 2**bits - 1, 4 * 2**bits - 1
    costs = {granularity: optimal(bits, granularity, P).cost for granularity in range(evenly_spaced, finest + 1)}
    for world_size in range(1, 3000):
        table, lane = choose(world_size, bits, P)
        assert table.bits == bits
        assert lane == accumulator_for(world_size, evenly_spaced)
        assert world_size * table.granularity <= np.iinfo(lane).max
        fits = [cost for granularity, cost in costs.items() if world_size * granularity <= np.iinfo(lane).max]
        assert table.cost == costs[table.granularity] <= 1.005 * min(fits)


def test_granularity_falls_with_the_ranks_until_lanes_widen() -> None:
    found = {n: choose(n, 4, P) for n in (2, 4, 8, 15, 16, 17, 18, 1110, 4369, 4370)}
    shape = {n: (table.granularity, lane.itemsize) for n, (table, lane) in found.items()}
    assert shape == {
        2: (59, 1), 4: (59, 1), 8: (17, 1), 15: (17, 1), 16: (15, 1), 17: (15, 1), 18: (59, 2), 1110: (59, 2),
        4369: (15, 2), 4370: (59, 4),
    }  # fmt: skip
    assert found[8].table.cost <= optimal(4, 30, P).cost


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_more_bits_get_a_table_no_worse_than_evenly_spaced_values(bits: int) -> None:
    for world_size in (1, 2, 3, 4, 8, 9, 100):
        table, lane = choose(world_size, bits, P)
        assert (table.bits, lane) == (bits, accumulator_for(world_size, 2**bits - 1))
        assert world_size * table.granularity <= np.iinfo(lane).max
        assert table.cost <= optimal(bits, 2**bits - 1, P).cost


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_clamp_has_the_least_error_of_copies_above_its_bound(bits: int) -> None:
    for world_size in (1, 3, 4, 8, 16, 200):
        table, _ = choose(world_size, bits, None)
        assert table.p in CLAMPED and (table.p == 1 / 32 or table.p >= 1 / (16 * world_size))
        finest = 4 * 2**bits - 1
        chosen = choose_p(world_size, bits, finest)
        tried = [p for p in CLAMPED if p == 1 / 32 or p >= 1 / (16 * world_size)]
        errors = {p: optimal(bits, finest, p).cost / world_size + clamping_error(p) for p in tried}
        assert errors[chosen] == min(errors.values())
    assert choose_p(16, 1, 1) == 1 / 32  # one bit: a wide range costs more than clamping


def test_lanes_that_are_asked_for_are_kept_to() -> None:
    table, lane = choose(18, 4, P, 8)
    assert (table.bits, lane) == (3, np.uint8)
    assert choose(8, 4, P, 16).accumulator == np.uint16
    assert choose(85, 4, P, 8).table.values == (0, 1, 2, 3)
    with pytest.raises(OptionError, match="Leave accumulator_bits out"):
        choose(86, 4, P, 8)  # with 1 bit, the error would be larger than the gradient
