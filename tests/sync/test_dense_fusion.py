"""Small tensors in one message, dense or cast, on several ranks; and residuals that another plan left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gradwire.compressors.base.registry import make
from gradwire.core.spec import TensorSpec
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import ranks

SPECS = {f"w{index}": TensorSpec((100 + 1400 * index, 3)) for index in range(8)}  # 480 kB in two submissions
WHOLE = sum(spec.numel for spec in SPECS.values())
DENSE = Plan("none")


def cast(compressor: str, strategy: str = "scatter_reduce", names: Sequence[str] = tuple(SPECS)) -> Plan:
    entry = PlanEntry(make(compressor), strategy, batched=True)
    return Plan.of_entries({name: entry if name in names else PlanEntry(make("none"), batched=True) for name in SPECS})


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randn(spec.shape, generator=generator).to(dtype) for name, spec in SPECS.items()}


def exact(world_size: int, *steps: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the sum of the ranks' means over some steps."""
    return sum(flat(gradients(rank, step, dtype)) / world_size for rank in range(world_size) for step in steps)


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for tensor in tensors.values()])


def take_step(one: Synchronizer, grads: dict[str, torch.Tensor], commit: bool = True) -> torch.Tensor:
    """Take one step in two submissions, and return the means."""
    one.begin_step()
    slices = [GradientSlice(name, grad) for name, grad in reversed(grads.items())]
    one.submit(slices[:3])
    one.submit(slices[3:])
    one.wait()
    if commit:
        one.commit()
    return flat(grads)


def assert_all_alike(found: Sequence[torch.Tensor]) -> None:
    assert all(torch.equal(first.nan_to_num(7e77), found[0].nan_to_num(7e77)) for first in found[1:])


# -- casts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compressor", "error"), [("bf16", 2**-8), ("fp16", 2**-11)])
@pytest.mark.parametrize("strategy", ["scatter_reduce", "ring", "allgather", "hierarchical"])
def test_cast_groups_give_the_mean_up_to_rounding_at_half_the_bytes(
    compressor: str, error: float, strategy: str
) -> None:
    def run(one: Synchronizer) -> tuple[torch.Tensor, int]:
        one.register(SPECS)
        mean = take_step(one, gradients(one.rank, 0))
        return mean, sum(tensor.sent_bytes for tensor in one.report().tensors.values())

    with ranks(3, cast(compressor, strategy)) as group:
        found = group.each(run)
        names = list(group.synchronizers[0].report().tensors)
    assert_all_alike([mean for mean, _ in found])
    scale = sum(flat(gradients(rank, 0)).abs() / 3 for rank in range(3))
    roundings = 4 if strategy == "ring" else 2
    wrong = (found[0][0] - exact(3, 0)).abs()
    assert (wrong <= roundings * error * scale + 1e-6).all()
    assert (wrong > 1e-6).any()
    assert names == ["w7 and 2 more", "w4 and 4 more"]
    if strategy in ("scatter_reduce", "ring"):
        sent = sum(nbytes for _, nbytes in found)
        assert 3 * 2 * 2 / 3 * 2 * WHOLE <= sent <= 3 * 2 * 2 / 3 * 2 * WHOLE + 10_000


def test_tensors_with_different_keys_are_not_fused() -> None:
    def run(one: Synchronizer) -> list[str]:
        take_step(one, gradients(one.rank, 0) | {"w0": gradients(one.rank, 0)["w0"].half()})
        return list(one.report().tensors)

    specs = SPECS | {"w0": TensorSpec(SPECS["w0"].shape, torch.float16)}
    with ranks(2, cast("bf16", names=("w0", "w1", "w2")), tensors=specs) as group:
        found = group.each(run)
    assert found[0] == found[1]
    assert set(found[0]) == {"w0", "w2 and 1 more", "w7 and 2 more", "w4 and 1 more"}


# -- what is not finite --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compressor", "value"), [("bf16", torch.nan), ("bf16", -torch.inf), ("fp16", 2e5)])
@pytest.mark.parametrize("strategy", ["scatter_reduce", "allgather"])
def test_a_value_that_does_not_fit_costs_every_rank_the_step(compressor: str, value: float, strategy: str) -> None:
    """Including a finite value that becomes infinite in fp16. Residuals are as before the step."""
    state = {"version": 2, "local": {"w2": {"100": torch.ones(900)}}, "aggregate": {}}

    def run(one: Synchronizer) -> list[torch.Tensor]:
        one.register(SPECS)
        one.residuals.load_state_dict(state, SPECS)
        grads = gradients(one.rank, 0)
        if one.rank == 1:
            grads["w2"][700, 1] = value
        means = [take_step(one, grads)]
        assert not one.residuals.is_open
        left = one.residuals.total()["w2"]
        assert not left[:100].any() and (left[100:1000] == 1).all() and not left[1000:].any()
        means.append(take_step(one, gradients(one.rank, 1)))
        assert not one.residuals.holds_after_pruning("w2")
        return means

    with ranks(3, cast(compressor, strategy)) as group:
        found = group.each(run)
    for step in range(2):
        assert_all_alike([means[step] for means in found])
    assert not found[0][0].isfinite().all()
    left = torch.zeros(WHOLE, dtype=torch.float64)
    start = sum(SPECS[name].numel for name in ("w0", "w1"))
    left[start + 100 : start + 1000] = 3.0  # mean units, of three ranks
    assert torch.allclose(found[0][1], exact(3, 1) + left, atol=0.05)


def test_what_fits_float32_fits_bf16() -> None:
    """The reason for it: in fp16 this step would be lost."""

    def run(one: Synchronizer) -> torch.Tensor:
        grads = gradients(one.rank, 0)
        grads["w4"][0, 0], grads["w4"][0, 1] = 1e30, 1e-30
        return take_step(one, grads)

    with ranks(2, cast("bf16")) as group:
        found = group.each(run)
    assert_all_alike(found)
    start = sum(SPECS[f"w{index}"].numel for index in range(4))
    assert found[0][start] == pytest.approx(1e30, rel=2**-7)
    assert found[0][start + 1] == pytest.approx(1e-30, rel=2**-7)


# -- what is left --------------------------------------------------------------------------------------------------

COMPRESSED = Plan("topk", min_elements=0)


def saved(world_size: int, dtype: torch.dtype) -> tuple[list[Any], torch.Tensor]:
    """States of a job that compressed what is small here, and the sum of its means."""

    def run(one: Synchronizer) -> tuple[Any, torch.Tensor]:
        applied = sum(take_step(one, gradients(one.rank, step, dtype)) for step in range(3))
        return one.state_dict(), applied

    with ranks(
        world_size, COMPRESSED, tensors={name: TensorSpec(spec.shape, dtype) for name, spec in SPECS.items()}
    ) as group:
        found = group.each(run)
    assert all(set(SPECS) & set(state["residuals"]["local"]) for state, _ in found)
    return [state for state, _ in found], found[0][1]


@pytest.mark.parametrize(("plan", "error"), [(DENSE, 1e-5), (cast("bf16"), 0.2)])
def test_a_residual_that_was_loaded_is_added_to_the_group(plan: Plan, error: float) -> None:
    states, applied = saved(3, torch.float32)

    def run(one: Synchronizer) -> torch.Tensor:
        one.register(SPECS)
        one.load_state_dict(states[one.rank])
        assert any(one.residuals.holds_after_pruning(name) for name in SPECS)
        mean = take_step(one, gradients(one.rank, 3))
        assert not any(one.residuals.holds_after_pruning(name) for name in SPECS)
        return mean + take_step(one, gradients(one.rank, 4))

    with ranks(3, plan) as group:
        found = group.each(run)
    assert_all_alike(found)
    produced = exact(3, 0, 1, 2, 3, 4)
    assert (applied - exact(3, 0, 1, 2)).abs().max() > 1  # else there is nothing to lose
    assert (applied + found[0] - produced).abs().max() < error


def test_the_part_of_a_residual_that_16_bits_cannot_hold_stays() -> None:
    small, value, count = 0.125, 256.0, 9  # bfloat16 has 256 and 258, and nothing in between

    def run(one: Synchronizer) -> tuple[torch.Tensor, float]:
        one.register({"w": TensorSpec((10,), torch.bfloat16)})
        one.load_state_dict(one.state_dict() | {"residuals": residuals})
        total = torch.zeros(10, dtype=torch.float64)
        for _ in range(count):
            one.begin_step()
            grad = torch.full((10,), value + 2 * one.rank, dtype=torch.bfloat16)
            one.submit([GradientSlice("w", grad)])
            one.commit()
            total += grad.double()
        left = one.state_dict()["residuals"]["local"].get("w", {}).get("0", torch.zeros(10))
        return total, left.double()

    residuals = {"version": 2, "local": {"w": {"0": torch.full((10,), small)}}, "aggregate": {}}
    with ranks(2, DENSE) as group:
        found = group.each(run)
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(left, torch.full((10,), small, dtype=torch.float64)) for _, left in found)


def test_an_unused_tensor_keeps_its_residual() -> None:
    residuals = {"version": 2, "local": {"w": {"0": torch.ones(10)}}, "aggregate": {}}

    def run(one: Synchronizer) -> list[torch.Tensor]:
        one.register({"w": TensorSpec((10,))})
        one.residuals.load_state_dict(residuals, {"w": TensorSpec((10,))})
        means = []
        for used in (False, True):
            one.begin_step()
            grad = torch.zeros(10)
            one.submit([GradientSlice("w", grad, used=used)])
            one.commit()
            means.append(grad)
        return means

    with ranks(2, DENSE) as group:
        for unused, given in group.each(run):
            assert not unused.any()
            assert torch.equal(given, torch.full((10,), 2.0))  # of both ranks
