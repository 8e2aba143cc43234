"""Hierarchical: bytes within and between nodes, nodes of any size, and the special cases of one node or one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.core.spec import TensorSpec
from gradwire.sync.plan import Plan
from gradwire.sync.strategies.hierarchical import owners_of
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import Ranks, ranks

NUMEL = 20 * 1024


def gradient(rank: int, step: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + step))


def take_step(one: Synchronizer, step: int, *, used: bool = True, numel: int = NUMEL) -> torch.Tensor:
    one.begin_step()
    grad = gradient(one.rank, step, numel) if used else torch.zeros(numel)
    one.submit([GradientSlice("w", grad.view(64, -1), used=used)])
    one.commit()
    return grad


def held(one: Synchronizer) -> torch.Tensor:
    total = torch.zeros(NUMEL, dtype=torch.float64)
    kept = one.residuals.total().get("w", np.zeros(0))  # up to the last element with a residual
    total[: kept.size] = torch.from_numpy(kept)
    return total


def plan(method: Any, strategy: str = "hierarchical", partitions: int | None = None) -> Plan:
    return Plan({"w": method}, strategy=strategy, partitions=partitions)


def between_nodes(group: Ranks, names: list[Any]) -> int:
    """Bytes that one rank sent to a rank of another node."""
    return sum(
        nbytes
        for rank, transport in enumerate(group.network.transports)
        for peer, nbytes in enumerate(transport.sent_bytes)
        if names[rank] != names[peer]
    )


@pytest.mark.parametrize(
    ("names", "factor"), [([0, 0, 1, 1], 2), ([0, 0, 0, 1, 1, 1], 3), ([0, 1, 2, 0, 1, 2], 2), ([0, 0, 0, 0, 1], 8 / 5)]
)
def test_bytes_between_nodes_fall_by_the_ranks_of_a_node(names: list[int], factor: float) -> None:
    found = {}
    for strategy in ("hierarchical", "scatter_reduce"):
        with ranks(len(names), plan("onebit", strategy, partitions=2 * len(names)), nodes=names) as group:
            group.each(lambda one: take_step(one, 0))
            found[strategy] = between_nodes(group, names)
            elsewhere = {one.rank: held(one).any() for one in group.synchronizers}
        assert all(elsewhere.values()), "every rank encodes something"
    assert found["scatter_reduce"] / found["hierarchical"] == pytest.approx(factor, rel=0.1)


NODES: list[Any] = [2, [0, 1, 0, 1, 0], [0, 0, 0, 1, 2]]


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize(
    ("method", "partitions", "error"),
    [("none", 1, 1e-6), ("none", 7, 1e-6), ("int8shared", 3, 2e-2), ("fp16", 2, 2e-3)],
)
def test_nodes_of_any_shape_give_the_mean_to_all(nodes: Any, method: str, partitions: int, error: float) -> None:
    with ranks(5, plan(method, partitions=partitions), nodes=nodes) as group:
        means = group.each(lambda one: take_step(one, 0))
    exact = sum(gradient(rank, 0) for rank in range(5)) / 5
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert (means[0] - exact).norm() < error * exact.norm()


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize(("method", "options"), [("onebit", {}), ("topk", {"ratio": 0.05}), ("powersgd", {})])
def test_nothing_is_lost_on_nodes_of_any_shape(nodes: Any, method: str, options: Any) -> None:
    """Including nodes of which all or some ranks did not use the parameter."""
    steps = 12

    def used(rank: int, step: int) -> bool:
        return step % 4 != 3 or rank in (2, 4)

    def run(one: Synchronizer) -> tuple[torch.Tensor, torch.Tensor]:
        return sum(take_step(one, step, used=used(one.rank, step)).double() for step in range(steps)), held(one)

    with ranks(5, plan(gw.make(method, **options)), nodes=nodes) as group:
        found = group.each(run)
    produced = sum(gradient(rank, step).double() for rank in range(5) for step in range(steps) if used(rank, step)) / 5
    assert all(torch.equal(applied, found[0][0]) for applied, _ in found)
    left = sum(kept for _, kept in found)
    assert left.norm() > 0.1 * produced.norm()
    assert torch.allclose(found[0][0] + left, produced, rtol=0, atol=1e-4)


def test_a_parameter_that_no_rank_used_keeps_its_residuals() -> None:
    def run(one: Synchronizer) -> bool:
        take_step(one, 0)
        before = held(one)
        mean = take_step(one, 1, used=False)
        return not mean.any() and torch.equal(held(one), before)

    with ranks(4, plan("onebit")) as group:
        assert all(group.each(run))


def test_integers_between_nodes_are_added_and_never_encoded_again() -> None:
    """The mean is an integer multiple of the quantization step, larger than one payload can hold."""
    numel, world_size = 1024, 4
    with ranks(world_size, plan(gw.make("int8shared", block=1024)), nodes=2) as group:
        means = group.each(lambda one: take_step(one, 0, numel=numel))
    grads = [gradient(rank, 0, numel) / world_size for rank in range(world_size)]
    sums = [grads[0] + grads[1], grads[2] + grads[3]]
    levels = means[0].double() / (max(float(each.abs().max()) for each in sums) / 127)
    assert torch.allclose(levels, levels.round(), rtol=0, atol=1e-3)
    assert (levels - sum(sums).double() / (max(float(each.abs().max()) for each in sums) / 127)).abs().max() <= 2.001


def test_everything_is_dense_on_one_node() -> None:
    with ranks(3, plan("onebit"), nodes=3) as group:
        means = group.each(lambda one: take_step(one, 0))
        (row,) = (one.report().tensors["w"] for one in group.synchronizers[:1])
    assert row.method == "none() ring"
    assert torch.allclose(means[0], sum(gradient(rank, 0) for rank in range(3)) / 3, atol=1e-6)


@pytest.mark.parametrize("method", ["threelc", "int8shared"])
def test_with_one_rank_per_node_it_is_scatter_reduce(method: str) -> None:
    found = []
    for strategy in ("hierarchical", "scatter_reduce"):
        with ranks(3, plan(method, strategy, 2), nodes=1) as group:
            mean = group.each(lambda one: [take_step(one, step) for step in range(3)])[0][-1]
            found.append((mean.tolist(), [transport.sent_bytes for transport in group.network.transports]))
    assert found[0] == found[1]


def test_tensors_that_come_later_and_fused_ones_travel_too() -> None:
    """One that was not registered, and small ones that are fused."""

    def run(one: Synchronizer) -> list[torch.Tensor]:
        one.begin_step()
        tensors = {name: torch.full(shape, float(one.rank)) for name, shape in SHAPES.items()}
        one.submit([GradientSlice(name, tensor) for name, tensor in tensors.items()])
        one.commit()
        return list(tensors.values())

    with ranks(4, Plan("onebit", strategy="hierarchical")) as group:
        group.each(lambda one: one.register({"w": TensorSpec(SHAPES["w"])}))
        for tensors in group.each(run):
            assert all(torch.allclose(tensor, torch.full_like(tensor, 1.5)) for tensor in tensors)


SHAPES = {"w": (200, 100), "bias": (100,), "scale": (7,), "late": (150, 150)}


def test_every_node_has_owners_and_they_share_the_chunks() -> None:
    nodes = ((0, 2, 4), (1, 3))
    assert [owners_of(nodes, merger) for merger in range(5)] == [[0, 1], [0, 1], [2, 3], [2, 3], [1, 4]]
