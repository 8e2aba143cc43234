"""One suite for all strategies: real engines and frames, one thread per rank."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.core.errors import OptionError
from gradwire.core.spec import TensorSpec
from gradwire.sync.chunk import RANGE_ALIGNMENT
from gradwire.sync.plan import Plan
from gradwire.sync.strategies import peer_strategies
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import ANY, ranks

NAMES = peer_strategies()
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}), ("fp16", {}), ("bf16", {}), ("int8", {}), ("int8shared", {}), ("onebit", {}),
    ("topk", {"ratio": 0.05}), ("threelc", {}),
]  # fmt: skip
LISTED: list[tuple[str, dict[str, Any]]] = [
    ("topk", {"ratio": 0.05}), ("topk", {"ratio": 1.0}), ("topk", {"warmup": 2}), ("dgc", {"ratio": 0.01}),
    ("dragonn", {"ratio": 0.01}), ("dragonn", {"ratio": 0.05, "carry": True}), ("randomk", {"ratio": 0.2}),
    ("threshold", {}), ("mstopk", {}), ("graddrop", {}),
]  # fmt: skip


def gradient(rank: int, step: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + step)).to(dtype)


def run_steps(
    synchronizer: Synchronizer, steps: int, numel: int, dtype: torch.dtype = torch.float32, first: int = 0
) -> list[Any]:
    """Average `steps` gradients, and return the means."""
    means = []
    for step in range(first, first + steps):
        synchronizer.begin_step()
        grad = gradient(synchronizer.rank, step, numel, dtype)
        synchronizer.submit([GradientSlice("w", grad)])
        synchronizer.wait()
        synchronizer.commit()
        means.append(grad)
    return means


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("strategy", "method", "options"),
    [(strategy, *method) for strategy in ANY for method in METHODS] + [("sparse_reduce", *each) for each in LISTED],
)
def test_all_ranks_hold_the_same_bits(strategy: str, world_size: int, method: str, options: Any) -> None:
    plan = Plan(gw.make(method, **options), strategy=strategy, min_elements=0)
    with ranks(world_size, plan) as group:
        group.each(lambda one: one.register({"w": TensorSpec((91, 97))}))
        by_rank = group.each(lambda one: [mean.view(-1) for mean in run_2d(one, 3)])
    for means in by_rank[1:]:
        for left, right in zip(by_rank[0], means, strict=True):
            assert torch.equal(left, right)
    exact = sum(gradient(rank, 0, 91 * 97) / world_size for rank in range(world_size))
    error = (by_rank[0][0] - exact).norm() / exact.norm()
    assert error < {"none": 1e-6, "fp16": 2e-3, "bf16": 2e-2, "int8": 5e-2, "int8shared": 5e-2}.get(method, 4.0)


def run_2d(synchronizer: Synchronizer, steps: int) -> list[torch.Tensor]:
    means = []
    for step in range(steps):
        synchronizer.begin_step()
        grad = gradient(synchronizer.rank, step, 91 * 97).view(91, 97)
        synchronizer.submit([GradientSlice("w", grad)])
        synchronizer.commit()
        means.append(grad)
    return means


@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        *((strategy, method) for strategy in ANY for method in ("onebit", "threelc")),
        *(pytest.param(strategy, "signsgd", marks=pytest.mark.ci) for strategy in ANY),
        ("sparse_reduce", "topk:ratio=0.05"),
        pytest.param("sparse_reduce", "dragonn:ratio=0.05:carry=True", marks=pytest.mark.ci),
    ],
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.ci)])
def test_nothing_is_lost_in_300_steps(strategy: str, method: str, seed: int) -> None:
    """Conservation: produced = applied + residuals of both roles, including skipped steps and steps with a NaN."""
    world_size, numel, steps = 3, 5000, 300
    chosen = np.random.default_rng(seed)
    fate = chosen.choice(["take", "skip", "nan"], size=steps, p=[0.9, 0.06, 0.04])
    victim = chosen.integers(world_size, size=steps)

    def run(one: Synchronizer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        produced, applied = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
        for step in range(steps):
            one.begin_step()
            grad = gradient(one.rank, 7000 * seed + step, numel) * (1 + step % 5)
            kept = grad.double() / world_size
            if fate[step] == "nan" and victim[step] == one.rank:
                grad[step % numel] = float("nan")
            one.submit([GradientSlice("w", grad)])
            one.wait()
            if fate[step] == "skip":
                one.rollback()
                continue
            one.commit()
            assert bool(grad.isfinite().all()) == (fate[step] == "take")
            if fate[step] == "take":
                produced += kept
                applied += grad.double()
        held = torch.zeros(numel, dtype=torch.float64)
        residuals = one.residuals.state_dict()
        for role in ("local", "aggregate"):
            for start, values in residuals[role].get("w", {}).items():
                held[int(start) : int(start) + values.numel()] += values.double()
        return produced, applied, held

    with ranks(world_size, Plan({"w": method}, strategy=strategy)) as group:
        found = group.each(run)
    produced = sum(each[0] for each in found)
    applied = found[0][1]
    held = sum(each[2] for each in found)
    assert held.norm() > 0
    # float32 arithmetic over 300 steps on sums of this size
    assert torch.allclose(applied + held, produced, rtol=0, atol=1e-3 * produced.abs().max().item())


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_signs_are_those_of_the_majority(world_size: int) -> None:
    """Each rank has one vote, independent of its gradient's size and of who counts. A tie is positive."""
    numel = 5000
    plan = Plan({"w": "signsgd"}, strategy="scatter_reduce", feedback="none")
    grads = [gradient(rank, 0, numel) * 10**rank for rank in range(world_size)]

    def run(one: Synchronizer) -> torch.Tensor:
        one.begin_step()
        mean = grads[one.rank].clone()
        one.submit([GradientSlice("w", mean)])
        one.wait()
        return mean

    with ranks(world_size, plan) as group:
        means = group.each(run)
    votes = sum(torch.where(grad >= 0, 1, -1) for grad in grads)
    for mean in means:
        assert torch.equal(mean > 0, votes >= 0)


@pytest.mark.parametrize("partitions", [1, 2])
def test_with_feedback_each_rank_and_each_aggregate_make_up_for_their_own_errors(partitions: int) -> None:
    """signSGD of a whole tensor by its definition: the owner's gradient has one vote, like all others."""
    world_size, numel, steps = 3, 2 * RANGE_ALIGNMENT, 5
    plan = Plan({"w": "signsgd"}, strategy="scatter_reduce", partitions=partitions, min_elements=0)

    def run(one: Synchronizer) -> list[torch.Tensor]:
        means = run_steps(one, 2, numel)
        one.load_state_dict(one.state_dict())  # changes nothing
        return means + run_steps(one, steps - 2, numel, first=2)

    with ranks(world_size, plan) as group:
        found = group.each(run)

    def signs(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.where(values >= 0, scale, -scale)

    ends = torch.arange(partitions + 1) * numel // partitions
    for start, end in itertools.pairwise(ends.tolist()):
        local, aggregate = torch.zeros(world_size, end - start), torch.zeros(end - start)
        for step in range(steps):
            grads = torch.stack([gradient(rank, step, numel)[start:end] for rank in range(world_size)])
            local += grads / world_size
            votes = signs(local, local.abs().mean(1).max())
            local -= votes
            aggregate += votes.sum(0)
            mean = signs(aggregate, aggregate.abs().mean())
            aggregate -= mean
            for means in found:
                torch.testing.assert_close(means[step][start:end], mean, rtol=1e-5, atol=1e-7)


def test_without_the_aggregate_residual_most_of_the_gradient_is_lost() -> None:
    """The test above can fail: without feedback, far more than its tolerance is missing."""
    world_size, numel, steps = 3, 5000, 100

    def run(one: Synchronizer) -> tuple[torch.Tensor, torch.Tensor]:
        produced = sum(gradient(one.rank, step, numel) / world_size for step in range(steps))
        return produced, sum(run_steps(one, steps, numel))

    with ranks(world_size, Plan({"w": "threelc"}, strategy="scatter_reduce", feedback="none")) as group:
        found = group.each(run)
    produced, applied = sum(each[0] for each in found), found[0][1]
    assert (applied - produced).norm() > 0.3 * produced.norm()


@pytest.mark.parametrize("strategy", ANY)
def test_partitions_change_nothing_for_an_exact_compressor(strategy: str) -> None:
    """From one range, which travels whole, to more than three per rank."""
    world_size, found = 3, []
    for partitions in range(1, 3 * world_size + 2):
        with ranks(world_size, Plan("none", strategy=strategy, partitions=partitions, min_elements=0)) as group:
            group.each(lambda one: one.register({"w": TensorSpec((91, 97))}))
            by_rank = group.each(lambda one: run_2d(one, 2))
        for means in by_rank[1:]:
            assert all(torch.equal(*pair) for pair in zip(by_rank[0], means, strict=True))
        found.append(by_rank[0])
    one_per_rank = found[world_size - 1]
    for means in found:
        for left, right in zip(one_per_rank, means, strict=True):
            assert torch.allclose(left, right, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "method"),
    [(strategy, method) for strategy in ANY for method in ("onebit", "int8shared", "terngrad")]
    + [("sparse_reduce", "topk:ratio=0.05"), ("sparse_reduce", "dgc")],
)
@pytest.mark.parametrize(("world_size", "partitions"), [(2, 1), (3, 2), (5, 3), (4, 6), (1, 2)])
def test_any_number_of_partitions_gives_equal_replicas(
    strategy: str, method: str, world_size: int, partitions: int
) -> None:
    names = [f"w{index}" for index in range(3)]

    def run(one: Synchronizer) -> list[torch.Tensor]:
        means = [gradient(one.rank, index, 6000) for index in range(len(names))]
        one.begin_step()
        one.submit([GradientSlice(name, mean) for name, mean in zip(names, means)])
        one.wait()
        one.commit()
        return means

    with ranks(world_size, Plan({"w*": method}, strategy=strategy, partitions=partitions)) as group:
        by_rank = group.each(run)
    for means in by_rank[1:]:
        assert all(torch.equal(*pair) for pair in zip(by_rank[0], means, strict=True))


@pytest.mark.parametrize(
    ("strategy", "method"),
    [(strategy, method) for strategy in ANY for method in ("none", "threelc", "int8")] + [("sparse_reduce", "topk")],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_element_type_travels(strategy: str, dtype: torch.dtype, method: str) -> None:
    with ranks(3, Plan({"w": method}, strategy=strategy)) as group:
        by_rank = group.each(lambda one: run_steps(one, 2, 6000, dtype))
    assert all(torch.equal(left, right) for means in by_rank for left, right in zip(by_rank[0], means, strict=True))
    assert by_rank[0][0].dtype == dtype


@pytest.mark.parametrize("numel", [1, 5, 1023, 1024, 1025, 3000])
@pytest.mark.parametrize("strategy", NAMES)
def test_tensors_with_fewer_elements_than_ranks(strategy: str, numel: int) -> None:
    method = "topk:ratio=1" if strategy == "sparse_reduce" else "none"
    with ranks(5, Plan({"w": method}, strategy=strategy)) as group:
        by_rank = group.each(lambda one: run_steps(one, 2, numel))
    exact = sum(gradient(rank, 1, numel) for rank in range(5)) / 5
    for means in by_rank:
        assert torch.allclose(means[1], exact, atol=1e-6)


@pytest.mark.parametrize("strategy", ANY)
def test_bytes_are_those_the_strategy_promises(strategy: str) -> None:
    """Dense, W = 4: W − 1 payloads for allgather, 2 (W − 1)/W for the others; headers apart.

    Hierarchical on nodes of two: 1 within the node, 2 (M − 1)/W between nodes.
    """
    numel = 8192
    with ranks(4, Plan({"w": "none"}, strategy=strategy)) as group:
        group.each(lambda one: run_steps(one, 1, numel))
        sent = [sum(transport.sent_bytes) for transport in group.network.transports]
        reported = [one.report().total.sent_bytes for one in group.synchronizers]
    payload = numel * 4
    frames = {"allgather": 3, "hierarchical": 6, "ring": 6, "scatter_reduce": 6}[strategy]
    factor = {"allgather": 3.0, "hierarchical": 1.5, "ring": 1.5, "scatter_reduce": 1.5}[strategy]
    assert sent == [factor * payload + frames * 72] * 4
    assert reported == sent


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize(("method", "options"), LISTED)
def test_sparse_reduce_has_the_bits_of_an_allgather(world_size: int, method: str, options: Any) -> None:
    """Also of fused tensors, of one that a rank does not use, and with equal and with different positions."""
    names, found = ["a", "b", "c"], []

    def run(one: Synchronizer) -> list[torch.Tensor]:
        means = []
        for step in range(3):
            one.begin_step()
            grads = [gradient(one.rank if name == "a" else 0, step, 3000) for name in names]
            one.submit(
                [GradientSlice(each, grad, used=each != "c" or one.rank > 0) for each, grad in zip(names, grads)]
            )
            one.commit()
            means += grads
        return means

    for strategy in ("allgather", "sparse_reduce"):
        for partitions in (1, 2):
            rules = {name: gw.make(method, **options) for name in names}
            with ranks(world_size, Plan(rules, strategy=strategy, partitions=partitions)) as group:
                by_rank = group.each(run)
            assert all(torch.equal(*pair) for means in by_rank for pair in zip(by_rank[0], means, strict=True))
            found.append(by_rank[0])
    for other in (0, 1):
        assert all(torch.equal(*pair) for pair in zip(found[other], found[other + 2], strict=True))


def test_sparse_reduce_sends_parts_and_sums_and_no_list_that_grows_with_equal_positions() -> None:
    """With equal positions on all ranks, each rank sends two lists of (W − 1)/W pairs; an all-gather sends W − 1."""
    world_size, numel, sent = 8, 1 << 16, {}

    def run(one: Synchronizer) -> None:
        one.begin_step()
        one.submit([GradientSlice("w", gradient(0, 0, numel))])
        one.commit()

    for strategy in ("allgather", "sparse_reduce"):
        with ranks(world_size, Plan({"w": "topk:ratio=0.01"}, strategy=strategy)) as group:
            group.each(run)
            sent[strategy] = [sum(transport.sent_bytes) for transport in group.network.transports]
            assert [one.report().total.sent_bytes for one in group.synchronizers] == sent[strategy]
    bytes_of_pairs = (sum(sent["allgather"]) / world_size / 7 - 72) * 7 / 8
    lists = sum(sent["sparse_reduce"]) / world_size - 14 * (72 + 4)
    assert lists == pytest.approx(2 * bytes_of_pairs, rel=0.05)
    assert max(sent["sparse_reduce"]) < 1.3 * min(sent["sparse_reduce"]), "owners have equal parts"


def test_sparse_reduce_refuses_what_lists_no_pairs_and_dense_tensors_travel_as_usual() -> None:
    with pytest.raises(OptionError, match="for compressors that list pairs"):
        Plan("onebit", strategy="sparse_reduce")
    plan = Plan("topk", strategy="sparse_reduce")
    assert plan.entry("bias", TensorSpec((10,))).strategy == "scatter_reduce"
    assert plan.entry("weight", TensorSpec((100, 100))).strategy == "sparse_reduce"
