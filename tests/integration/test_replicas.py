"""Replicas that differ become equal: after changes of all kinds, and after sums that did not come in time."""

from __future__ import annotations

import pytest

from tests.integration.launch import launch, results


def test_all_ranks_hold_the_bits_of_one_and_know_how_far_they_were_apart() -> None:
    ranks = results(launch("replicas.copy", 3))
    assert len({rank["before"] for rank in ranks}) == 3
    for rank in ranks:
        assert rank["after"] == ranks[1]["before"]
        assert rank["source"] == 1 and rank["in order"]
        first, second, third = rank["distances"]
        assert first > 0.1 and second == 0 and third > 0.1
        assert rank["again"] == [0, 0, 0, 0], "equal, so the first is copied"
        assert rank["said"].startswith("Buffers or optimizer state of rank 2 have other shapes or types than those of")


@pytest.mark.ci
def test_a_rank_that_does_not_synchronize_is_an_error_in_time() -> None:
    said, _ = results(launch("replicas.absent", 2))
    assert "Replicas could not be synchronized: " in said
    assert said.endswith("Call it on every rank, between steps.")


@pytest.mark.ci
def test_ranks_that_fill_are_told_and_are_equal_after_each_epoch() -> None:
    ranks = results(launch("replicas.fill", 2))
    first, second = ranks
    for epoch in range(3):
        assert first["hashes"][2 * epoch] != second["hashes"][2 * epoch]
        assert first["hashes"][2 * epoch + 1] == second["hashes"][2 * epoch + 1]
        assert first["distances"][epoch] == second["distances"][epoch]
        source, distances = first["distances"][epoch]
        assert ranks[source]["filled"][epoch] == min(rank["filled"][epoch] for rank in ranks)
        assert distances[source] == 0 and 0 < max(distances) < 0.5
    (said,) = first["said"]
    assert "not synchronized for 3 steps. Call handle.synchronize_replicas() after each epoch. If epochs" in said
    assert not second["said"], "rank 0 says it"
    assert sum(second["filled"]), "some sums never come"
    for rank in ranks:  # whether the first fills depends on how fast it is sent again what is lost
        said = any("elements had a mean of zero on this rank" in note for note in rank["notes"])
        assert said == any(rank["filled"])
