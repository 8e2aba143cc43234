"""Expected sizes of lists of pairs, against lists that were drawn and packed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planner import pairs
from gradwire.sync.sparse_codec import list_bytes

SIZE = 1 << 18


@pytest.mark.parametrize("density", [1e-3, 1e-2, 0.1, 0.5, 1.0])
def test_lists_have_the_expected_bytes(density):
    packed = list_bytes(SIZE, round(density * SIZE))
    assert pairs.list_bytes(density) * SIZE == pytest.approx(packed, rel=0.03)


@given(st.floats(1e-6, 1.0))
def test_density_is_the_inverse_of_bytes(density):
    assert pairs.density(pairs.list_bytes(density)) == pytest.approx(density, rel=1e-4)


@pytest.mark.parametrize("world_size", [2, 8, 64])
@pytest.mark.parametrize("density", [0.001, 0.05])
def test_different_positions_of_ranks_that_draw_independently(world_size, density):
    count, rng = round(density * SIZE), np.random.default_rng(0)
    seen = np.zeros(SIZE, bool)
    for _ in range(world_size):
        seen[rng.choice(SIZE, count, replace=False)] = True
    expected = pairs.density_of_sum(count / SIZE, world_size, overlap=0.0)
    assert np.count_nonzero(seen) / SIZE == pytest.approx(expected, rel=0.01)
    assert pairs.density_of_sum(count / SIZE, world_size, overlap=1.0) == pytest.approx(count / SIZE)


def test_a_sum_over_one_rank_is_its_payload_and_nothing_is_sent_of_nothing():
    assert pairs.sum_bytes(5000.0, 1e5, 1, 0.3) == pytest.approx(5000.0, rel=1e-4)
    assert pairs.growth(5000.0, 1e5, 1, 0.3) == pytest.approx(1.0)
    assert pairs.sum_bytes(0.0, 0, 4, 0.0) == 0.0
    assert pairs.growth(0.0, 1e5, 4, 0.0) == 1.0
