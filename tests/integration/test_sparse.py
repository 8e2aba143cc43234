"""`strategy="sparse_reduce"` through DDP in real processes, with error feedback and with momentum correction."""

from __future__ import annotations

import pytest

from tests.integration.jobs.sparse import INFINITE
from tests.integration.launch import launch, results


@pytest.mark.parametrize(
    ("world_size", "methods"),
    [
        (2, ["dragonn:ratio=0.05"]),
        pytest.param(4, ["dragonn:ratio=0.05", "topk:ratio=0.02", "dgc:ratio=0.05"], marks=pytest.mark.ci),
    ],
)
@pytest.mark.timeout(300)
def test_sparse_reduce_trains_like_an_all_gather_bit_for_bit(world_size: int, methods: list[str]) -> None:
    """The same means in every step, replicas, residuals and velocities; nothing is lost, also over a skipped step."""
    strategies, steps = ["allgather", "sparse_reduce"], 12
    ranks = results(
        launch("sparse.trained", world_size, timeout=280, methods=methods, strategies=strategies, steps=steps)
    )
    for method in methods:
        for feedback in ("error", "momentum", "momentum:masking=False"):
            gathered, reduced = ([rank[f"{method} {each} {feedback}"] for rank in ranks] for each in strategies)
            assert len({one["state"] for one in reduced}) == world_size, "each rank has residuals of its own"
            for one, other in zip(reduced, gathered, strict=True):
                assert one["taken"] == [step != INFINITE for step in range(steps)]
                assert one["means"] == other["means"] == reduced[0]["means"], (method, feedback)
                assert one["parameters"] == other["parameters"] == reduced[0]["parameters"]
                assert one["state"] == other["state"]
                assert "aggregate" not in one["roles"]
                assert ("velocity" in one["roles"]) == (feedback != "error")
                if feedback != "momentum":  # masking deletes velocities
                    assert one["deviation"] <= 1e-5 * one["size"], (method, feedback)
