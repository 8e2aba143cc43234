"""The paper's equations, and properties that hold with any hardware."""

import pytest
from benchmarks.papers.hipress.equations import (
    PARAMETERS,
    Counts,
    Hardware,
    choose,
    compressed_seconds,
    original_seconds,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from gradwire.planner.curves import LinearCost

MB = 2**20
EC2 = Hardware(
    send=LinearCost(2e-5, 8e-11), encode=LinearCost(2e-5, 1.2e-11), decode=LinearCost(2e-5, 1.2e-11), rate=1 / 32
)
lines = st.builds(LinearCost, st.floats(0, 1e-3), st.floats(1e-13, 1e-8))
hardware = st.builds(Hardware, send=lines, encode=lines, decode=lines, rate=st.floats(0.001, 0.5))


def test_parameters_are_those_of_table_3_and_section_6_1():
    assert PARAMETERS["ring"](16, 5) == Counts(30, 16, 16)
    assert PARAMETERS["ps"](16, 5) == Counts(32, 6, 17)
    assert PARAMETERS["ps_colocated"](16, 5) == Counts(30, 5, 16)


def test_equations_written_out():
    m, K, N = 4 * MB, 3, 4
    assert original_seconds(EC2, "ps", m, K, N) == pytest.approx(8 * (2e-5 + 8e-11 * m / K))
    wire, coding = 6 * (2e-5 + 8e-11 * m / 32 / K), 3 * (2e-5 + 1.2e-11 * m / K) + 4 * (2e-5 + 1.2e-11 * m / 32 / K)
    assert compressed_seconds(EC2, "ps_colocated", m, K, N) == pytest.approx(wire + coding)


@given(hardware, st.sampled_from(sorted(PARAMETERS)), st.integers(2, 32), st.integers(2, 4), st.floats(1, 1e9))
def test_batches_beyond_the_nodes_overlap_but_are_not_free(hw, topology, N, batches, m):
    one = compressed_seconds(hw, topology, m, N, N)
    many = compressed_seconds(hw, topology, batches * m, batches * N, N)
    assert one * (1 - 1e-9) + (batches - 1) * one / 2 <= many * (1 + 1e-9)  # the busier is at least half
    assert many <= batches * one * (1 + 1e-9)


@given(hardware, st.integers(2, 32), st.floats(1, 1e9))
def test_a_ring_of_the_equations_always_wants_as_many_partitions_as_nodes(hw, N, m):
    """Table 7 has 1, 4 and 5 partitions for rings of 4 and 16: no hardware makes the printed equation choose that."""
    seconds = [compressed_seconds(hw, "ring", m, K, N) for K in range(1, N + 1)]
    assert seconds == sorted(seconds, reverse=True)


@given(hardware, st.integers(2, 16), st.integers(1, 16), st.floats(1, 1e9))
def test_more_nodes_never_want_fewer_partitions(hw, N, more, m):
    """Table 7 has 2 partitions of 4 MB for 4 nodes and 1 for 16: no hardware makes the printed equation choose that."""
    one, two = (lambda nodes, K=K: compressed_seconds(hw, "ps_colocated", m, K, nodes) for K in (1, 2))
    assume(two(N) < one(N) * (1 - 1e-9))
    assert two(N + more) < one(N + more)


def test_choose_takes_the_least_and_says_dense_where_that_is_less():
    large = choose(EC2, "ps_colocated", 392 * MB, 16)
    assert large.compress
    assert large.seconds == min(compressed_seconds(EC2, "ps_colocated", 392 * MB, K, 16) for K in range(1, 65))
    small = choose(EC2, "ring", 1000, 16)
    assert not small.compress
    assert small.seconds == small.dense_seconds < compressed_seconds(EC2, "ring", 1000, 16, 16)
