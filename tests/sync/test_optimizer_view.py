"""Levels that ranks derive from parameters: replicas stay equal, and all ranks learn of it if one has others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.compressors.support.gcomp_metric import Numbers
from gradwire.core.errors import SyncError
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.sync.optimizer_view import OptimizerView
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import ranks

NUMEL = 9000
RATE = 2.0**-8
STRATEGIES = ("ring", "scatter_reduce")


def state(factor: float = 1.0, common: bool = True) -> Callable[[str, ElementRange], Mapping[str, torch.Tensor]]:
    """The state of plain SGD, with parameters times `factor`."""
    parameter = torch.randn(NUMEL, generator=torch.Generator().manual_seed(5)) * factor
    numbers = torch.tensor(Numbers(direct=RATE), dtype=torch.float32)

    def aux(name: str, elements: ElementRange) -> Mapping[str, torch.Tensor]:
        return {
            "parameter": parameter[elements.offset : elements.end],
            "numbers": numbers,
            "loss_scale": torch.tensor(1.0),
            "common": torch.tensor(common),
        }

    return aux


def gradient(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 + rank)) * 1e-3


def plan(strategy: str, partitions: int | None = None, levels: str = "auto") -> Plan:
    return Plan({"w": gw.make("gcomp", levels=levels, refresh=0)}, strategy=strategy, partitions=partitions)


def take_step(one: Synchronizer, used: bool = True) -> torch.Tensor:
    one.register({"w": TensorSpec((NUMEL,))})
    one.begin_step()
    grad = gradient(one.rank)
    one.submit([GradientSlice("w", grad, used=used)])
    one.wait()
    one.commit()
    return grad


def sent_bytes(one: Synchronizer) -> int:
    return int(one.report().total.sent_bytes)


@pytest.mark.parametrize("partitions", [1, 2, None])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_derived_levels_take_fewer_bytes_and_stay_within_the_bound(world_size, strategy, partitions) -> None:
    means, sent = {}, {}
    for levels in ("auto", "sent"):
        with ranks(world_size, plan(strategy, partitions, levels), aux_of=lambda rank: state()) as group:
            found = group.each(take_step)
            assert all(torch.equal(found[0], other) for other in found[1:])
            assert not any(one.state_mismatch for one in group.synchronizers)
            means[levels], sent[levels] = found[0], sum(map(sent_bytes, group.synchronizers))
    exact = sum(gradient(rank).double() for rank in range(world_size)) / world_size
    parameter = state()("w", ElementRange(0, NUMEL))["parameter"].double()
    for mean in means.values():
        off = RATE * (mean.double() - exact).abs()
        sums = world_size * 2.0**-24 * RATE * gradient(0).abs().max()  # of float32 sums on the way
        assert off.max() > 0
        assert (off <= 2.0**-23 * parameter.abs() + sums).all()
    assert sent["auto"] < 0.85 * sent["sent"]


@pytest.mark.parametrize("partitions", [1, 2, None])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("other", [0, 1, 2])
def test_all_ranks_learn_that_one_has_another_state_and_roll_back(other, strategy, partitions) -> None:
    common = [True]

    def aux_of(rank: int) -> Any:
        factor = 4.0 if rank == other else 1.0
        return lambda name, elements: state(factor, common[0])(name, elements)

    with ranks(3, plan(strategy, partitions), aux_of=aux_of) as group:
        found = group.each(take_step)
        assert all(grad.isnan().any() for grad in found)
        assert all(torch.equal(found[0].isnan(), grad.isnan()) for grad in found)
        assert all(one.state_mismatch for one in group.synchronizers)
        common[0] = False  # as `gradwire.ddp` does
        found = group.each(take_step)
        assert all(torch.equal(found[0], grad) for grad in found)
        assert found[0].isfinite().all()


@pytest.mark.parametrize("strategy", [*STRATEGIES, "allgather", "hierarchical"])
@pytest.mark.parametrize("partitions", [1, 3])
def test_with_ranks_that_did_not_use_the_parameter_all_still_decide_alike(strategy, partitions) -> None:
    """Whoever has another state and whoever uses the parameter: all ranks have the same mean, or all know."""
    for other, used in itertools.product(range(3), itertools.product([False, True], repeat=3)):
        with ranks(
            3, plan(strategy, partitions), aux_of=lambda rank, other=other: state(4.0 ** (rank == other))
        ) as group:
            found = group.each(lambda one, used=used: take_step(one, used[one.rank]))
            known = {one.state_mismatch for one in group.synchronizers}
            assert len(known) == 1, (other, used)
            if not known.pop():
                assert all(torch.equal(found[0], grad) for grad in found), (other, used)
                assert found[0].isfinite().all()


def test_with_levels_that_must_be_derived_another_state_is_an_error_on_all_ranks() -> None:
    with ranks(2, plan("ring", levels="derived"), aux_of=lambda rank: state(1.0 + rank)) as group:
        errors = group.outcomes(take_step)
        assert all(isinstance(error, SyncError) for error in errors)
        assert any('gw.make("gcomp", levels="sent")' in str(error) for error in errors)


@pytest.mark.parametrize("strategy", ["allgather", "hierarchical"])
def test_where_not_all_would_learn_of_it_levels_are_sent(strategy) -> None:
    sent = {}
    for levels in ("auto", "sent"):
        with ranks(4, plan(strategy, levels=levels), aux_of=lambda rank: state()) as group:
            group.each(take_step)
            assert {entry.strategy for entry in group.synchronizers[0]._tensors.entries.values()} == {strategy}
            sent[levels] = sum(map(sent_bytes, group.synchronizers))
    assert sent["auto"] == sent["sent"]


def test_the_shares_of_an_error_add_up() -> None:
    slices = state()
    for num_encoders in (2, 3, 4, 128):
        view = OptimizerView(slices, merges_once=True)
        own, aggregate = view.error_share(False, num_encoders), view.error_share(True, num_encoders)
        assert own is not None
        assert aggregate is not None
        assert (num_encoders - 1) * own + aggregate == pytest.approx(1)
    assert OptimizerView(slices).error_share(True, 4) is None
