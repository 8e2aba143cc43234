"""Re-planning during training: replicas stay identical, and no residual is lost."""

from __future__ import annotations

import pytest
import torch

from gradwire.compressors.base import registry
from gradwire.core.errors import DisagreementError, OptionError, SyncError
from gradwire.core.spec import TensorSpec
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import ranks

NUMEL = 9000


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * rank + step))


def plan(method: str, strategy: str, partitions: int | None = None, feedback: str | None = None) -> Plan:
    return Plan({"w": method}, strategy=strategy, partitions=partitions, feedback=feedback)


def take_step(one: Synchronizer, step: int) -> torch.Tensor:
    one.begin_step()
    grad = gradient(one.rank, step)
    one.submit([GradientSlice("w", grad)])
    one.wait()
    one.commit()
    return grad


PLANS = [
    plan("onebit", "scatter_reduce"),
    plan("none", "ring"),
    plan("threelc", "ring"),
    plan("threelc", "hierarchical"),
    plan("signsgd", "scatter_reduce", 3),
    plan("onebit", "scatter_reduce", 1),  # fused
    plan("onebit", "scatter_reduce", 2),
    plan("threelc", "ring", 1),
    plan("threelc", "hierarchical", 7),
    plan("int8shared", "hierarchical", 2, "error"),
    plan("onebit", "allgather"),
    plan("int8", "allgather", feedback="error"),
    plan("topk", "allgather"),
    plan("none", "hierarchical"),
    plan("none", "scatter_reduce"),
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_lost_from_plan_to_plan(world_size: int) -> None:
    def run(one: Synchronizer) -> tuple[torch.Tensor, torch.Tensor]:
        one.register({"w": TensorSpec((NUMEL,))})
        applied, hashes = torch.zeros(NUMEL, dtype=torch.float64), []
        for number, next_plan in enumerate(PLANS):
            one.replan(next_plan)
            for step in range(4):
                mean = take_step(one, 4 * number + step)
                applied += mean.double()
                hashes.append(mean)
        return applied, torch.stack(hashes)

    with ranks(world_size, plan("onebit", "ring")) as group:
        found = group.each(run)
        held = [one.residuals.holds_after_pruning("w") for one in group.synchronizers]
    for _, means in found[1:]:
        assert torch.equal(means, found[0][1])
    produced = sum(
        gradient(rank, step).double() / world_size for rank in range(world_size) for step in range(4 * len(PLANS))
    )
    # The last plan is dense: it has sent all residuals of the others.
    assert held == [False] * world_size
    assert torch.allclose(found[0][0], produced, rtol=0, atol=1e-4 * produced.abs().max().item())


def test_a_dense_step_sends_the_residual_and_the_next_needs_none() -> None:
    def run(one: Synchronizer) -> list[bool]:
        take_step(one, 0)
        found = [one.residuals.holds_after_pruning("w")]
        one.replan(plan("none", "ring"))
        for step in (1, 2):
            take_step(one, step)
            found.append(one.residuals.holds_after_pruning("w"))
        return [*found, one.residuals.nbytes > 0]

    with ranks(2, plan("topk", "scatter_reduce")) as group:
        assert group.each(run) == [[True, False, False, False]] * 2


UNBIASED = [
    name for name in registry.names() if registry.make(name).unbiased and not registry.make(name).needs_optimizer
]


@pytest.mark.parametrize("feedback", ["none", "momentum"])
@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("method", UNBIASED)
def test_what_is_left_for_an_unbiased_compressor_is_sent_once(method: str, partitions: int, feedback: str) -> None:
    """With error feedback from then on, residuals of compressors that are no contractions would grow forever."""

    def run(one: Synchronizer) -> list[bool]:
        found = []
        for step in range(4):
            if step == 2:
                rules = {"w": method}  # whatever its size
                one.replan(Plan(rules, strategy="allgather", partitions=partitions, feedback=feedback))
            mean = take_step(one, step)
            assert mean.isfinite().all()
            found.append(bool(one.residuals.norms()) and one.residuals.holds_after_pruning("w"))
        return found

    with ranks(2, plan("topk", "allgather")) as group:
        assert group.each(run) == [[True, True, False, False]] * 2


@pytest.mark.parametrize("partitions", [1, 2])  # one is fused
def test_what_an_owner_held_in_two_roles_becomes_one_residual(partitions: int) -> None:
    """Under signsgd it encodes its own gradient and the sum, and keeps what each of them leaves."""

    def held_twice(one: Synchronizer) -> int:
        places = torch.zeros(2, NUMEL)
        state = one.residuals.state_dict()
        for place, role in zip(places, ("local", "aggregate"), strict=True):
            for offset, values in state[role].get("w", {}).items():
                place[int(offset) : int(offset) + len(values)] = values
        return int(torch.count_nonzero(places.prod(0)))

    def run(one: Synchronizer) -> tuple[int, int]:
        for step in range(3):
            take_step(one, step)
        before = held_twice(one)
        one.replan(plan("onebit", "scatter_reduce", partitions))
        for step in range(3, 6):
            take_step(one, step)
        return before, held_twice(one)

    with ranks(2, plan("signsgd", "scatter_reduce", partitions, "error")) as group:
        before, after = zip(*group.each(run), strict=True)
    assert sum(before) > 0.9 * NUMEL and sum(after) == 0


def rules(method: str) -> Plan:
    """A plan in which one method has all tensors; dense ones travel alone."""
    if method not in ("ring", "scatter_reduce"):
        return Plan(method, strategy="allgather", partitions=1, min_elements=0)
    dense = PlanEntry(registry.make("none"), method, None, "none", batched=False)
    return Plan.of_entries(dict.fromkeys("abc", dense))


@pytest.mark.parametrize("method", ["int8", "int8shared", "fp16", "ring", "scatter_reduce"])
def test_what_travels_together_does_not_depend_on_the_residuals_of_a_rank(method: str) -> None:
    """Only rank 0 has ever used one of the tensors, so only it holds a residual of it."""
    names = ("a", "b", "c")

    def run(one: Synchronizer) -> tuple[torch.Tensor, torch.Tensor]:
        one.register({name: TensorSpec((90, 100)) for name in names})
        applied = torch.zeros(len(names), NUMEL, dtype=torch.float64)
        for step in range(6):
            if step == 3:
                one.replan(rules(method))
            one.begin_step()
            grads = [gradient(one.rank, 10 * step + index).view(90, 100) for index in range(len(names))]
            used = [True, True, one.rank == 0]
            grads[2] *= used[2]
            one.submit([GradientSlice(*each) for each in zip(names, grads, (0, 0, 0), used, strict=True)])
            one.wait()
            one.commit()
            applied += torch.stack(grads).double().view(-1, NUMEL)
        held = one.residuals.total()
        return applied, torch.stack([torch.tensor(held.get(name, [0.0] * NUMEL)) for name in names])

    with ranks(2, Plan("onebit", strategy="allgather", partitions=1, min_elements=0)) as group:
        found = group.each(run)
    assert torch.equal(found[0][0], found[1][0])
    produced = torch.stack([
        sum(
            gradient(rank, 10 * step + index).double() / 2
            for rank in range(2 if index < 2 else 1)
            for step in range(6)
        )
        for index in range(len(names))
    ])  # fmt: skip
    if method == "fp16":  # keeps what 16 bits cannot hold where there is a residual to add, and rounds elsewhere
        assert torch.allclose(found[0][0] + found[0][1] + found[1][1], produced, rtol=0, atol=0.02)
    else:
        assert (found[0][0] + found[0][1] + found[1][1] - produced).norm() < 0.02 * produced.norm()


def test_after_different_plans_every_rank_raises_and_goes_on_with_the_plan_that_it_had() -> None:
    def run(one: Synchronizer) -> torch.Tensor:
        take_step(one, 0)
        before = one.plan, one.residuals.state_dict()["velocity"]["w"]["0"]
        with pytest.raises(DisagreementError):
            one.replan(plan("onebit" if one.rank else "topk", "ring"))
        assert one.plan is before[0]
        assert torch.equal(one.residuals.state_dict()["velocity"]["w"]["0"], before[1])
        return take_step(one, 1)

    with ranks(2, plan("topk", "allgather", 1, "momentum")) as group:
        one, other = group.each(run)
    assert torch.equal(one, other)


def test_replanning_in_the_middle_of_a_step_is_refused() -> None:
    def run(one: Synchronizer) -> None:
        one.begin_step()
        one.submit([GradientSlice("w", gradient(one.rank, 0))])
        with pytest.raises(SyncError, match=r"Call commit\(\)"):
            one.replan(plan("none", "ring"))

    with ranks(2, plan("onebit", "ring")) as group:
        group.each(run)


def test_a_plan_that_needs_what_there_is_not_is_refused() -> None:
    def run(one: Synchronizer) -> None:
        take_step(one, 0)
        with pytest.raises(OptionError, match=r'Pass it, attach\(ddp, "gcomp", optimizer=opt\)'):
            one.replan(plan("gcomp", "ring"))

    with ranks(2, plan("none", "ring")) as group:
        group.each(run)


def test_small_tensors_may_leave_their_fusion_group_and_come_back() -> None:
    small = ["a", "b", "c"]

    def run(one: Synchronizer) -> list[torch.Tensor]:
        one.register({name: TensorSpec((50,)) for name in small})
        means = []
        for rules in ({"*": "none"}, {"b": "topk", "*": "none"}, {"*": "none"}):
            one.replan(Plan(rules))
            for step in range(3):
                one.begin_step()
                grads = [gradient(one.rank, step)[50 * index :][:50].clone() for index in range(3)]
                one.submit([GradientSlice(name, grad) for name, grad in zip(small, grads)])
                one.wait()
                one.commit()
                means.append(torch.cat(grads))
        return means

    with ranks(2, Plan("none")) as group:
        first, second = group.each(run)
    assert all(torch.equal(*pair) for pair in zip(first, second))
    produced = sum(gradient(rank, step)[:150] / 2 for rank in range(2) for step in range(3))
    assert torch.allclose(sum(first), 3 * produced, atol=1e-5)
    assert not torch.allclose(sum(first[:6]), 2 * produced, atol=1e-5)
