"""Training on a GPU: gradients travel through pinned memory, and are encoded on the CPU.

The ranks share one GPU, so they synchronize over Gloo. NCCL wants a GPU for each rank; here it has one rank.
"""

from __future__ import annotations

import pytest

from tests.integration.launch import launch, results

METHODS = ["none", "fp16", "onebit", "threelc", "topk:ratio=0.05", "int8", "thc", "powersgd"]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("strategy", ["allgather", "ring", "scatter_reduce"])
def test_replicas_on_a_gpu_are_identical_and_learn(strategy: str) -> None:
    arguments = {"methods": METHODS, "strategy": strategy, "steps": 100, "backend": "gloo"}
    first, second = results(launch("gpu.train", 2, timeout=280, **arguments))
    for method in METHODS:
        assert first[method]["hash"] == second[method]["hash"], method
        assert first[method]["finite"], method
        losses = first[method]["losses"]
        assert losses[-1] < 0.9 * losses[0], method


def test_one_rank_trains_over_nccl() -> None:
    methods = ["none", "onebit"]
    (found,) = results(launch("gpu.train", 1, timeout=280, methods=methods, strategy="ring", steps=100, backend="nccl"))
    for method in methods:
        assert found[method]["losses"][-1] < 0.9 * found[method]["losses"][0]


def test_none_has_the_mean_of_ddp() -> None:
    assert max(results(launch("gpu.compare", 2, timeout=280))) < 1e-5
