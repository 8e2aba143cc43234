import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.bench.statistics import (
    Split,
    Spread,
    across_ranks,
    ideal_step,
    relative_difference,
    ring_bytes,
    wire_seconds,
)

seconds = st.floats(0, 1e3)


@given(st.lists(seconds, min_size=1))
def test_a_spread_encloses_its_median(values):
    spread = Spread.of(values)
    assert spread.p20 <= spread.median * (1 + 1e-12)
    assert spread.median <= spread.p80 * (1 + 1e-12)
    assert spread.size == len(values)


def test_a_spread_of_nothing_is_not_a_number():
    assert math.isnan(Spread.of([]).median)


def test_ideal_step_is_the_larger_of_compute_and_wire():
    assert ideal_step(0.1, 12.5e6, 100_000_000) == pytest.approx(1.0)
    assert ideal_step(0.1, 12.5e3, 100_000_000) == 0.1
    assert ideal_step(0.1, 12.5e9, None) == 0.1


def test_wire_seconds_counts_bits():
    assert wire_seconds(1e6, 8_000_000) == 1.0


def test_a_ring_sends_nearly_twice_the_bytes():
    assert ring_bytes(100, 1) == 0
    assert ring_bytes(100, 2) == 100
    assert ring_bytes(100, 4) == 150


def test_across_ranks_is_the_mean_of_each_step():
    assert across_ranks([[1.0, 2.0], [3.0, 6.0]]) == [2.0, 4.0]


@given(seconds, seconds, seconds, seconds)
def test_the_parts_of_a_step_add_up_to_it(step, compute, encode, decode):
    split = Split.of(step, compute, encode, decode)
    assert split.compute + split.encode + split.wire + split.decode == pytest.approx(step)
    assert min(split.compute, split.encode, split.wire, split.decode) >= 0


def test_codec_work_that_fits_beside_the_backward_is_not_in_the_split():
    assert Split.of(1.0, 1.0, 0.3, 0.1) == Split(1.0, 0.0, 0.0, 0.0)


def test_relative_difference_has_a_sign():
    assert relative_difference(9.0, 10.0) == pytest.approx(-0.1)
    assert math.isnan(relative_difference(9.0, 0.0))
