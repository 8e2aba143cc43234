"""Momentum correction over several ranks: equal replicas, dense tensors too, resumed and resized without loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.core.errors import OptionError
from gradwire.core.spec import TensorSpec
from gradwire.residuals import MomentumCorrection
from gradwire.sync.group import GroupInfo
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.resize import resize_state
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import ranks

SHAPES = {"embed": (60, 50), "large": (40, 100), "bias": (30,)}
RULES = {"embed": gw.make("dragonn", ratio=0.05), "large": "none", "*": "topk"}


def plan(**options) -> Plan:
    return Plan(RULES, feedback=MomentumCorrection(0.9, **options), min_elements=1000)


def gradient(name: str, rank: int, step: int) -> torch.Tensor:
    seed = step * 10 + rank + 1000 * len(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def run(one: Synchronizer, steps: range) -> dict[str, torch.Tensor]:
    """Return the means summed over the steps, by name."""
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in steps:
        one.begin_step()
        grads = {name: gradient(name, one.rank, step) for name in SHAPES}
        one.submit([GradientSlice(name, grad) for name, grad in grads.items()])
        one.commit()
        for name, grad in grads.items():
            total[name] += grad
    return total


def test_all_ranks_have_the_same_and_dense_tensors_have_the_momentum_of_sgd() -> None:
    with ranks(3, plan()) as job:
        totals = job.each(lambda one: run(one, range(6)))
        kept = [one.residuals.total() for one in job.synchronizers]
        velocities = [one.residuals.state_dict()["velocity"] for one in job.synchronizers]
    assert all(set(each) == set(SHAPES) for each in velocities)
    for name in SHAPES:
        assert all(torch.equal(total[name], totals[0][name]) for total in totals)
        velocity, wanted = np.zeros(SHAPES[name]), np.zeros(SHAPES[name])
        for step in range(6):
            velocity = 0.9 * velocity + np.mean([gradient(name, rank, step).numpy() for rank in range(3)], axis=0)
            wanted += velocity
        if name != "embed":
            np.testing.assert_allclose(totals[0][name].numpy(), wanted, atol=1e-4)
            assert all(name not in each for each in kept)
        else:
            assert all(name in each for each in kept)


def test_without_masking_velocities_are_sent_or_in_the_residuals() -> None:
    with ranks(2, plan(masking=False)) as job:
        totals = job.each(lambda one: run(one, range(5)))
        kept = sum(one.residuals.total()["embed"] for one in job.synchronizers)
    velocity, wanted = np.zeros(SHAPES["embed"]), np.zeros(SHAPES["embed"])
    for step in range(5):
        velocity = 0.9 * velocity + np.mean([gradient("embed", rank, step).numpy() for rank in range(2)], axis=0)
        wanted += velocity
    np.testing.assert_allclose(totals[0]["embed"].numpy() + kept.reshape(SHAPES["embed"]), wanted, atol=1e-3)


def test_a_resumed_job_goes_on_bit_for_bit_and_a_smaller_one_loses_no_velocity() -> None:
    with ranks(3, plan()) as job:
        whole = job.each(lambda one: (run(one, range(3)), run(one, range(3, 6))))[0][1]
    with ranks(3, plan()) as job:
        job.each(lambda one: run(one, range(3)))
        states = job.each(lambda one: one.state_dict())
    specs = {name: TensorSpec(shape) for name, shape in SHAPES.items()}
    with ranks(3, plan(), tensors=specs) as job:
        job.each(lambda one: one.load_state_dict(states[one.rank]))
        resumed = job.each(lambda one: run(one, range(3, 6)))[0]
    for name in SHAPES:
        assert torch.equal(resumed[name], whole[name])

    def velocity(states: list, name: str) -> np.ndarray:
        total = np.zeros(int(np.prod(SHAPES[name])))
        for state in states:
            for offset, values in state["residuals"]["velocity"].get(name, {}).items():
                total[int(offset) : int(offset) + values.numel()] += values.numpy()
        return total

    fewer = resize_state(states, 2)
    for name in SHAPES:
        np.testing.assert_allclose(velocity(fewer, name), velocity(states, name), atol=1e-6)


def test_another_policy_deletes_the_velocities() -> None:
    with ranks(2, plan()) as job:
        job.each(lambda one: run(one, range(2)))
        job.each(lambda one: one.replan(Plan("topk", min_elements=1000)))
        job.each(lambda one: run(one, range(2, 4)))
        assert all("velocity" not in one.residuals.state_dict() for one in job.synchronizers)


def test_compressed_tensors_travel_by_all_gather_and_small_dense_tensors_are_not_fused() -> None:
    entries = {name: plan().entry(name, TensorSpec(shape)) for name, shape in SHAPES.items()}
    assert {name: (each.strategy, each.batched) for name, each in entries.items()} == {
        "embed": ("allgather", False), "large": ("ring", False), "bias": ("scatter_reduce", False)
    }  # fmt: skip
    assert {each.feedback for each in entries.values()} == {"momentum"}


def test_plans_that_cannot_be_are_refused_with_advice() -> None:
    for strategy in ("scatter_reduce", "ring", "hierarchical"):
        with pytest.raises(OptionError, match='Leave strategy out, or pass strategy="allgather"'):
            Plan("topk", feedback="momentum", strategy=strategy)
    with pytest.raises(OptionError, match="Momentum correction needs all-gather"):
        Plan.of_entries({"w": PlanEntry(gw.make("topk"), "scatter_reduce", feedback="momentum")})
    with pytest.raises(OptionError, match=r"needs at least two ranks.*momentum in the optimizer"):
        Synchronizer(GroupInfo(0, 1, dist.HashStore(), "alone"), Plan("topk", feedback="momentum"))


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**16])
@pytest.mark.parametrize("partitions", [1, 3, 5])
def test_a_gradient_is_clipped_as_a_whole_however_it_is_cut(partitions: int, loss_scale: float) -> None:
    """Parts with norms of their own would be clipped differently, and the gradient would point elsewhere."""
    clip, world_size, size = 6.0, 3, 6000

    def gradient(rank: int) -> torch.Tensor:
        values = torch.randn(size, generator=torch.Generator().manual_seed(rank))
        return values * torch.linspace(0, 1, size) * (0.001 if rank == 2 else 1.0)

    def run(one: Synchronizer) -> torch.Tensor:
        one.residuals.loss_scale = loss_scale
        one.begin_step()
        grad = loss_scale * gradient(one.rank)
        one.submit([GradientSlice("w", grad)])
        one.wait()
        one.commit()
        return grad / loss_scale

    with ranks(world_size, Plan("none", partitions=partitions, feedback=f"momentum:clip={clip}")) as group:
        found = group.each(run)
    norms = [float(gradient(rank).norm()) for rank in range(world_size)]
    most = clip * world_size**0.5  # of a gradient, a third of which is a rank's part of the mean
    assert norms[2] < most < min(norms[:2])
    expected = sum(gradient(rank) * min(1.0, most / norm) for rank, norm in enumerate(norms)) / world_size
    for mean in found:
        torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-6)
