"""The synchronizer on several ranks: tensors of every form, steps as transactions, state, reports, failures."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.core.errors import (
    DisagreementError,
    OptionError,
    PeerFailedError,
    PeerLostError,
    PeerTimeoutError,
    SyncError,
)
from gradwire.core.spec import TensorSpec
from gradwire.sync.group import GroupInfo
from gradwire.sync.plan import Plan
from gradwire.sync.strategies import peer_strategies
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from gradwire.sync.warmup import warm_up
from gradwire.tuning.measure_link import measure_links
from tests.net.memory import MemoryNetwork
from tests.net.recorder import until
from tests.sync.harness import ANY, fitting, ranks

NUMEL = 6000
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
ALL = Plan({"*w": "threelc", "*": "none"})


def gradient(rank: int, step: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + step))


def take_step(one: Synchronizer, step: int, *, grad: torch.Tensor | None = None, commit: bool = True) -> torch.Tensor:
    """One step over the tensor "w"; returns its mean."""
    one.begin_step()
    grad = gradient(one.rank, step) if grad is None else grad
    one.submit([GradientSlice("w", grad)])
    one.wait()
    if commit:
        one.commit()
    return grad


def held(one: Synchronizer) -> torch.Tensor:
    """The committed residuals of both roles of "w", as one float64 tensor."""
    return held_in(one.state_dict())


def held_in(state: Any) -> torch.Tensor:
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for role in ("local", "aggregate"):
        for start, values in state["residuals"][role].get("w", {}).items():
            total[int(start) : int(start) + values.numel()] += values.double()
    return total


def same(left: Any, right: Any) -> bool:
    """Whether two states hold the same bits."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def alone(plan: Any = "threelc", **options: Any) -> Synchronizer:
    return Synchronizer(GroupInfo(0, 1, dist.HashStore(), f"alone {id(plan)}"), plan, **options)


# -- tensors of every form -----------------------------------------------------------------------------------------


def forms(rank: int) -> list[tuple[str, torch.Tensor]]:
    """Small and large, strided, scalar, empty, of all element types; the same names on all ranks."""
    base = torch.arange(24.0).view(4, 6) + rank
    tensors = {
        "scalar": torch.tensor(float(rank)),
        "empty": torch.empty(0, 3),
        "transposed": base.clone().T,
        "every other": base.clone()[:, ::2],
        "alone.w": gradient(rank, 0).view(60, 100).T,
        "large": gradient(rank, 1, 20_000).view(200, 100),
        "large strided": gradient(rank, 2, 40_000).view(200, 200)[:, ::2],
    }
    small = {f"small {dtype}": torch.full((5,), rank, dtype=dtype) for dtype in DTYPES}
    return [*tensors.items(), *small.items()]


def test_every_form_of_tensor_ends_as_the_mean_in_place() -> None:
    def run(one: Synchronizer) -> list[torch.Tensor]:
        mine = forms(one.rank)
        one.begin_step()
        future = one.submit([GradientSlice(name, tensor) for name, tensor in mine])
        value = future.wait()
        assert all(left is right for left, (_, right) in zip(value, mine, strict=True))
        return value

    with ranks(3, Plan("none")) as group:
        by_rank = group.each(run)
    for index, (name, first) in enumerate(forms(0)):
        exact = sum(forms(rank)[index][1].double() for rank in range(3)) / 3
        for means in by_rank:
            assert (means[index].shape, means[index].dtype) == (first.shape, first.dtype)
            assert torch.equal(means[index], by_rank[0][index]), name
            assert torch.allclose(means[index].double(), exact, atol=1e-5), name


def test_dense_tensors_of_one_dtype_share_a_message() -> None:
    def run(one: Synchronizer) -> dict[str, int]:
        one.begin_step()
        one.submit([GradientSlice(name, tensor) for name, tensor in forms(one.rank)]).wait()
        return {event.tensor: event.detail["elements"] for event in one.events.latest() if event.kind == "submit"}

    with ranks(2, Plan("none")) as group:
        for found in group.each(run):
            assert found == {
                "scalar and 6 more": 1 + 24 + 12 + 6000 + 5 + 2 * 20_000,
                "small torch.float16": 5,
                "small torch.bfloat16": 5,
                "small torch.float64": 5,
            }


def test_the_future_holds_what_it_was_told_to() -> None:
    def run(one: Synchronizer) -> bool:
        one.begin_step()
        bucket = torch.ones(4)
        return (
            one.submit([GradientSlice("w", bucket[:2]), GradientSlice("v", bucket[2:])], result=bucket).wait() is bucket
        )

    with ranks(2, "none") as group:
        assert group.each(run) == [True, True]


def test_nothing_to_do_is_done_at_once() -> None:
    def run(one: Synchronizer) -> None:
        assert one.submit([]).wait() == []
        empty = torch.empty(0)
        assert one.submit([GradientSlice("e", empty)]).wait()[0] is empty
        one.wait()

    with ranks(2, "none") as group:
        group.each(run)
        assert [sum(transport.sent_bytes) for transport in group.network.transports] == [0, 0]


def test_ranges_of_a_registered_tensor_keep_residuals_of_their_own() -> None:
    def run(one: Synchronizer) -> dict[str, Any]:
        one.register({"w": TensorSpec((NUMEL,))})
        one.begin_step()
        grad = gradient(one.rank, 0)
        for offset in (0, 4096):
            one.submit([GradientSlice("w", grad[offset : offset + 4096], offset)])
        one.commit()
        return one.state_dict()

    with ranks(2, Plan({"w": "threelc"}, strategy="allgather")) as group:
        for state in group.each(run):
            assert set(state["residuals"]["local"]["w"]) == {"0", "4096"}
            assert state["residuals"]["local"]["w"]["4096"].numel() == NUMEL - 4096


def test_an_unused_shard_leaves_its_residual_and_counts_as_zero() -> None:
    def run(one: Synchronizer) -> tuple[Any, Any, torch.Tensor]:
        take_step(one, 0)
        before = one.state_dict()["residuals"]
        one.begin_step()
        grad = torch.zeros(NUMEL)
        one.submit([GradientSlice("w", grad, used=False)])
        one.commit()
        return before, one.state_dict()["residuals"], grad

    with ranks(2, Plan({"w": "threelc"}, strategy="allgather")) as group:
        for before, after, mean in group.each(run):
            assert same(before, after)
            assert not mean.any()


# -- mistakes ------------------------------------------------------------------------------------------------------


def test_a_range_of_an_unknown_tensor_gets_advice() -> None:
    with ranks(2, "none") as group:
        for error in group.outcomes(lambda one: one.submit([GradientSlice("w", torch.zeros(5), offset=10)])):
            assert isinstance(error, OptionError)
            assert "Call register({name: TensorSpec(shape, dtype)}) with the shape of the full parameter" in str(error)


@pytest.mark.parametrize(
    ("tensor", "offset"),
    [
        (torch.zeros(101), 0),
        (torch.zeros(60), 41),
        (torch.zeros(1), 100),
        (torch.zeros(5), -1),
        (torch.zeros(0), 101),
        (torch.zeros(5, dtype=torch.float16), 0),
    ],
)
def test_a_range_that_is_not_the_tensors_is_refused_before_data_is_sent(tensor: torch.Tensor, offset: int) -> None:
    """Otherwise the peers would refuse its frames, and each would blame the others."""
    with ranks(2, "none") as group:
        group.each(lambda one: one.register({"w": TensorSpec((100,))}))
        for error in group.outcomes(lambda one: one.submit([GradientSlice("w", tensor.clone(), offset)])):
            assert isinstance(error, OptionError)
            assert f"but {tensor.numel()} elements of {tensor.dtype} from element {offset} on were" in str(error)
            assert "Submit a range of what is registered" in str(error)
        group.each(lambda one: one.submit([GradientSlice("w", torch.zeros(50), 50)]).wait())
        assert group.outcomes(lambda one: one.wait()) == [None, None]


@pytest.mark.parametrize("other", [TensorSpec((6,)), TensorSpec((5,), torch.float16), TensorSpec((5, 1))])
def test_a_second_tensor_of_one_name_gets_advice(other: TensorSpec) -> None:
    with ranks(2, "none") as group:
        group.each(lambda one: one.register({"w": TensorSpec((5,))}))
        group.each(lambda one: one.register({"w": TensorSpec((5,))}))
        for error in group.outcomes(lambda one: one.register({"w": other})):
            assert isinstance(error, OptionError)
            assert "Use another name." in str(error)


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        (lambda rank: {"w": TensorSpec((5 + rank,))}, "tensors[0].shape[0] = 5 on rank 0 and 6 on rank 1"),
        (lambda rank: {"w": TensorSpec((5,), DTYPES[rank])}, "tensors[0].dtype = 'torch.float32' on rank 0"),
        (lambda rank: {"wv"[rank % 2]: TensorSpec((5,))}, "tensors[0].name = 'w' on rank 0 and 'v' on rank 1"),
        (
            lambda rank: {f"{number}": TensorSpec((5,)) for number in range(rank + 1)},
            "len(tensors) = 1 on rank 0 and 2 on rank 1",
        ),
    ],
)
def test_ranks_that_register_different_tensors_all_raise_before_data_is_sent(specs: Any, said: str) -> None:
    with ranks(3, "none") as group:
        for error in group.outcomes(lambda one: one.register(specs(one.rank))):
            assert isinstance(error, DisagreementError)
            assert said in str(error)
        assert [sum(transport.sent_bytes) for transport in group.network.transports] == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (lambda rank: {"options": gw.SyncOptions(seed=rank)}, "seed = 0 on rank 0 and 1 on rank 1"),
        (
            lambda rank: {"options": gw.SyncOptions(timedelta(seconds=10 + rank))},
            "timeout = 10.0 on rank 0 and 11.0 on rank 1",
        ),
        (
            lambda rank: {"options": gw.SyncOptions(timedelta(seconds=10), time_slots=rank == 1)},
            "time_slots = False on rank 0 and True on rank 1",
        ),
        (lambda rank: {"plan": ("fp16", "threelc")[rank]}, "'fp16' on rank 0 and 'threelc' on rank 1"),
        (lambda rank: {"plan": Plan("fp16", partitions=1 + rank)}, "partitions = 1 on rank 0 and 2 on rank 1"),
        (lambda rank: {"plan": gw.make("topk", ratio=0.1 * (1 + rank))}, "options.ratio = '0.1' on rank 0"),
        (lambda rank: {"tensors": {}} if rank else {}, "len(tensors) = 1 on rank 0 and 0 on rank 1"),
    ],
)
def test_ranks_that_are_set_up_differently_all_raise(options: Any, said: str) -> None:
    store, found = dist.HashStore(), {}

    def make(rank: int) -> None:
        chosen = {
            "plan": "fp16",
            "tensors": {"w": TensorSpec((400, 400))},
            "options": gw.SyncOptions(timedelta(seconds=10)),
        }
        try:
            Synchronizer(GroupInfo(rank, 2, store, said), **(chosen | options(rank)))
        except DisagreementError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert said in found[0]


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_timeout_that_never_ends_well_is_refused(seconds: int) -> None:
    with pytest.raises(OptionError, match=r"Pass timedelta\(seconds=30\)"):
        gw.SyncOptions(timeout=timedelta(seconds=seconds))


def test_time_slots_on_another_transport_than_tcp_get_advice() -> None:
    with MemoryNetwork(2) as network:
        info, options = GroupInfo(0, 2, dist.HashStore(), "slots"), gw.SyncOptions(time_slots=True)
        with pytest.raises(OptionError, match="Leave out transport="):
            Synchronizer(info, options=options, transport=network.transports[0])


@pytest.mark.parametrize("strategy", peer_strategies())
def test_time_slots_change_no_bit(strategy: str) -> None:
    """Tensors that are fused, that travel alone, and that take several slots."""
    plan = Plan({"*b": "none", "*": gw.make("topk", ratio=0.3)}, strategy=strategy, partitions=2)
    sizes = {"a.w": 3000, "a.b": 30, "b.w": 1_500_000, "c.w": 200_000}
    tensors = {name: TensorSpec((size,)) for name, size in sizes.items()}

    def run(one: Synchronizer) -> list[torch.Tensor]:
        means: list[torch.Tensor] = []
        for step in range(3):
            one.begin_step()
            slices = [GradientSlice(name, gradient(one.rank, step, size)) for name, size in sizes.items()]
            one.submit(slices)
            one.wait()
            one.commit()
            means += [each.tensor for each in slices]
        return means

    found = []
    for time_slots in (False, True):
        with ranks(4, plan, tensors=tensors, time_slots=time_slots, timeout=30) as group:
            found += group.each(run)
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert torch.equal(mine, theirs)


# -- the step as a transaction -------------------------------------------------------------------------------------


def kinds(one: Synchronizer) -> list[str]:
    return [event.kind for event in one.events.latest() if event.kind in ("commit", "rollback")]


@pytest.mark.parametrize("strategy", peer_strategies())
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("ended_by", ["commit", "begin_step", "rollback"])
def test_a_step_that_is_not_finite_leaves_residuals_bit_for_bit(strategy: str, value: float, ended_by: str) -> None:
    def run(one: Synchronizer) -> None:
        take_step(one, 0)
        before = one.state_dict()["residuals"]
        bad = gradient(one.rank, 1)
        if one.rank == 1:
            bad[NUMEL // 2] = value
        mean = take_step(one, 1, grad=bad, commit=False)
        assert not mean.isfinite().all(), "every rank sees it"
        getattr(one, ended_by)()
        assert same(before, one.state_dict()["residuals"])
        assert kinds(one) == ["commit", "rollback"]
        assert take_step(one, 2).isfinite().all()
        assert kinds(one) == ["commit", "rollback", "commit"]

    with ranks(3, Plan({"w": fitting(strategy, "threelc")}, strategy=strategy)) as group:
        group.each(run)


def test_begin_step_counts_and_keeps_what_a_finite_step_staged() -> None:
    def run(one: Synchronizer) -> None:
        take_step(one, 0, commit=False)
        take_step(one, 1, commit=False)
        assert one.step == 2
        assert not held(one).any(), "not committed yet"
        assert kinds(one) == []
        one.commit()
        assert held(one).any()

    with ranks(2, Plan({"w": "threelc"})) as group:
        group.each(run)


def test_steps_that_are_rolled_back_might_as_well_not_have_been() -> None:
    def run(one: Synchronizer, detour: bool) -> list[torch.Tensor]:
        means = [take_step(one, 0)]
        if detour:
            take_step(one, 77, commit=False)
            one.rollback()
        return [*means, take_step(one, 1), take_step(one, 2)]

    found = []
    for detour in (False, True):
        with ranks(3, Plan({"w": "threelc"}, strategy="ring")) as group:
            found.append(group.each(lambda one, detour=detour: run(one, detour))[0])
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_rollback_and_commit_wait_for_what_was_submitted() -> None:
    def run(one: Synchronizer, end: Callable[[Synchronizer], None]) -> torch.Tensor:
        for step in range(10):
            one.begin_step()
            one.submit([GradientSlice("w", gradient(one.rank, step))])
            end(one)
            assert not one.residuals.is_open
        return held(one)

    with ranks(2, Plan({"w": "threelc"})) as group:
        assert not any(kept.any() for kept in group.each(lambda one: run(one, Synchronizer.rollback)))
        assert all(kept.any() for kept in group.each(lambda one: run(one, Synchronizer.commit)))


# -- state ---------------------------------------------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("strategy", "method", "options"),
    [(strategy, method, {}) for strategy in ANY for method in ("threelc", "onebit", "int8", "topk")]
    + [("sparse_reduce", "topk", {}), ("sparse_reduce", "dragonn", {"ratio": 0.05, "carry": True})],
)
def test_a_resumed_run_goes_on_bit_for_bit(strategy: str, method: str, options: Any) -> None:
    plan = Plan({"w": gw.make(method, **options)}, strategy=strategy)
    tensors = {"w": TensorSpec((NUMEL,))}

    def unbroken(one: Synchronizer) -> tuple[Any, torch.Tensor, Any]:
        for step in range(3):
            take_step(one, step)
        state = through_a_file(one.state_dict())
        return state, [take_step(one, step) for step in (3, 4)][-1], one.state_dict()

    with ranks(2, plan, seed=9, tensors=tensors) as group:
        saved = group.each(unbroken)

    def resumed(one: Synchronizer) -> tuple[torch.Tensor, Any]:
        one.load_state_dict(saved[one.rank][0])
        return [take_step(one, step) for step in (3, 4)][-1], one.state_dict()

    with ranks(2, plan, seed=1, tensors=tensors) as group:  # the seed is part of the state
        for (mean, state), (_, expected, end) in zip(group.each(resumed), saved, strict=True):
            assert torch.equal(mean, expected)
            assert same(state, end)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("scatter_reduce", 1), ("ring", 3)),
        (("ring", 2), ("allgather", 1)),
        (("allgather", 1), ("scatter_reduce", 2)),
        (("scatter_reduce", 4), ("scatter_reduce", 1)),
    ],
)
def test_a_resume_under_another_strategy_and_partitions_loses_nothing(old: Any, new: Any) -> None:
    """What is held is the same to the bit after loading, and goes on being conserved afterwards."""
    world_size, tensors = 3, {"w": TensorSpec((NUMEL,))}

    def plan(strategy: str, partitions: int) -> Plan:
        return Plan({"w": "threelc"}, strategy=strategy, partitions=partitions)

    def first(one: Synchronizer) -> Any:
        for step in range(4):
            take_step(one, step)
        return one.state_dict()

    with ranks(world_size, plan(*old), tensors=tensors) as group:
        states = group.each(first)
    before = sum(held_in(state) for state in states)
    assert before.norm() > 0

    def second(one: Synchronizer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        one.load_state_dict(through_a_file(states[one.rank]))
        loaded = held(one)
        applied = sum(take_step(one, step).double() for step in range(4, 8))
        return loaded, applied, held(one)

    with ranks(world_size, plan(*new), tensors=tensors) as group:
        found = group.each(second)
    assert torch.equal(sum(loaded for loaded, _, _ in found), before)
    produced = sum(gradient(rank, step).double() for rank in range(world_size) for step in range(4, 8)) / world_size
    left = sum(kept for _, _, kept in found)
    assert torch.allclose(found[0][1] + left, before + produced, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rank": 5}, "The state has rank 5, but this rank has rank 0. Load the state"),
        ({"world_size": 8}, "The state has world_size 8, but this rank has world_size 1"),
        ({"version": 99}, "The state has version 99, but this rank has version 2"),
        ({"version": None}, "The state has version None, but this rank has version 2"),
    ],
)
def test_the_state_of_another_rank_or_version_is_refused_with_advice(changed: Any, said: str) -> None:
    one = alone()
    state = one.state_dict()
    with pytest.raises(OptionError, match=said) as caught:
        one.load_state_dict(state | {"step": 9} | changed)
    assert "Load the state that the same rank saved in a group of the same size" in str(caught.value)
    assert one.step == 0
    with pytest.raises(OptionError):
        one.load_state_dict({})


def test_a_state_of_unknown_tensors_is_refused_and_changes_nothing() -> None:
    state = {"version": 2, "step": 5, "seed": 3, "rank": 0, "world_size": 1}
    residuals = {"version": 2, "local": {"v": {"0": torch.ones(4)}}, "aggregate": {}}
    one = alone(tensors={"w": TensorSpec((4,))})
    with pytest.raises(ValueError, match=r"Unknown parameter in the residual state 'v'. Known: w"):
        one.load_state_dict(state | {"residuals": residuals})
    assert (one.step, one.seed) == (0, 0)
    residuals["local"] = {"w": {"0": torch.ones(4)}}
    one.load_state_dict(state | {"residuals": residuals})
    assert (one.step, one.seed) == (5, 3)
    assert same(one.state_dict()["residuals"], residuals)


# -- a world of one rank -------------------------------------------------------------------------------------------


def test_a_world_of_one_rank_changes_no_bit_and_needs_no_thread() -> None:
    before = threading.active_count()
    one = alone(Plan({"*": "threelc"}), tensors={"w": TensorSpec((NUMEL,))})
    grad = gradient(0, 0)
    grad[3] = torch.nan
    expected = grad.clone()
    strided = torch.arange(10.0)[::2]
    one.begin_step()
    assert one.submit([GradientSlice("w", grad), GradientSlice("v", strided)]).wait()[0] is grad
    one.check_replicas([grad])
    one.wait()
    one.commit()
    one.rollback()
    assert torch.equal(grad.view(torch.int32), expected.view(torch.int32))
    assert strided.tolist() == [0, 2, 4, 6, 8]
    assert one.report().total.sent_bytes == 0
    assert "rank 0 of 1" in str(one.report())
    one.load_state_dict(through_a_file(one.state_dict()))
    assert one.step == 1
    assert threading.active_count() == before
    one.close()
    one.close()


# -- reports -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ANY)
def test_reported_bytes_are_the_transports(strategy: str) -> None:
    plan = Plan({"*w": "threelc", "s": gw.make("int8shared"), "*": "none"}, strategy=strategy, partitions=6)

    def run(one: Synchronizer) -> gw.Handle:
        for step in range(3):
            one.begin_step()
            shards = [GradientSlice(name, tensor) for name, tensor in forms(one.rank)]
            one.submit(
                [*shards, GradientSlice("w", gradient(one.rank, step)), GradientSlice("s", gradient(one.rank, step))]
            )
            one.commit()
        return one.report()

    with ranks(3, plan) as group:
        for report, transport in zip(group.each(run), group.network.transports, strict=True):
            assert report.total.sent_bytes == sum(row.sent_bytes for row in report.tensors.values())
            assert report.total.sent_bytes == sum(transport.sent_bytes)
            assert report.total.syncs == sum(row.syncs for row in report.tensors.values())
            assert (report.world_size, report.steps) == (3, 3)
            assert {row.syncs for row in report.tensors.values()} == {3}
            row = report.tensors["w"]
            assert row.elements == NUMEL
            assert row.dense_bytes == 3 * 2 * 2 * 4 * NUMEL // 3
            assert row.method == f"{gw.make('threelc')!r} {strategy}"
            assert row.ratio == row.dense_bytes / row.sent_bytes > 1
            assert row.residual_norm > 0
            assert row.encode_seconds > 0 and row.decode_seconds > 0 and row.latency_seconds > 0
            assert next(row for name, row in report.tensors.items() if name.startswith("scalar")).residual_norm == 0
            json.dumps(report.as_dict())


def test_the_reported_norm_is_that_of_the_state() -> None:
    def run(one: Synchronizer) -> tuple[float, float]:
        take_step(one, 0)
        return one.report().tensors["w"].residual_norm, held(one).norm().item()

    with ranks(2, Plan({"w": "threelc"}, strategy="allgather")) as group:
        for reported, exact in group.each(run):
            assert reported == pytest.approx(exact, rel=1e-6)


def test_figures_a_step_are_of_the_steps_of_this_run_also_where_a_state_was_loaded() -> None:
    def run(one: Synchronizer) -> gw.Handle:
        take_step(one, 0)
        state = one.state_dict()
        one.load_state_dict(state | {"step": 1000})
        take_step(one, 1)
        assert one.step == 1001
        return one.report()

    with ranks(2, Plan({"w": "threelc"})) as group:
        for report in group.each(run):
            assert report.steps == 2
            row, total = (line.split() for line in str(report).splitlines()[-2:])
            assert row[-5:] == total[-5:], "the one row is the total"


def test_the_residual_of_tensors_that_travel_together_is_reported() -> None:
    def run(one: Synchronizer) -> tuple[float, float]:
        one.begin_step()
        one.submit([GradientSlice(name, gradient(one.rank, 0)[:300].clone()) for name in "ab"])
        one.commit()
        return one.report().tensors["a and 1 more"].residual_norm, one.report().total.residual_norm

    with ranks(2, Plan({"?": "threelc"}, strategy="allgather")) as group:
        for row, total in group.each(run):
            assert row == total > 0


def test_what_a_plan_notes_is_logged_by_rank_0_and_stands_in_every_report(caplog: pytest.LogCaptureFixture) -> None:
    with ranks(2, Plan({"embd": "topk", "*": "threelc"}), tensors={"embed": TensorSpec((4, 4))}) as group:
        reports = group.each(lambda one: one.report())
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(logged) == 2
    assert "'embd' matches no parameter. Did you mean 'embed'?" in logged[0]
    assert "threelc compresses nothing: all 1 tensors" in logged[1]
    for report in reports:
        assert report.notes == logged
        assert str(report).endswith("\n".join(logged))


# -- failures ------------------------------------------------------------------------------------------------------

TIMEOUT = 2.0  # seconds; survivors have twice as long, and some more on a loaded machine
SLACK = 10.0


@pytest.mark.parametrize("strategy", peer_strategies())
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_rank_that_is_lost_ends_all_others_with_one_error(strategy: str, how: str, tmp_path: Path) -> None:
    victim, in_step = 1, threading.Barrier(3)
    plan, tensors = Plan({"w": fitting(strategy, "threelc")}, strategy=strategy), {"w": TensorSpec((NUMEL,))}
    # Compiled here: a compiler that keeps the interpreter busy looks like a dead rank under this timeout.
    warm_up([(plan.entry("w", tensors["w"]), torch.float32)])

    def run(one: Synchronizer) -> tuple[SyncError, float] | None:
        for step in range(2):
            take_step(one, step)
        one.begin_step()
        if one.rank == victim:
            in_step.wait()
            getattr(group.network, how)(victim)
            return None
        one.submit([GradientSlice("w", gradient(one.rank, 2))])
        in_step.wait()
        begun = time.monotonic()
        with pytest.raises(SyncError) as caught:
            one.wait()
        seconds = time.monotonic() - begun
        for call in (one.wait, one.begin_step, one.commit, one.state_dict, lambda: take_step(one, 9)):
            with pytest.raises(SyncError) as again:
                call()
            assert again.value is caught.value, "later calls raise the same"
        return caught.value, seconds

    with ranks(3, plan, timeout=TIMEOUT, dump_dir=tmp_path, tensors=tensors) as group:
        try:
            found = group.each(run)
        finally:
            group.network.thaw(victim)
    for rank in (0, 2):
        error, seconds = found[rank]
        assert isinstance(error, (PeerLostError if how == "kill" else PeerTimeoutError, PeerFailedError))
        assert (error.rank, error.tensor) == (victim, "w")
        assert error.phase is not None and error.phase.startswith("recv ")
        assert f"tensor w, {error.phase}" in str(error)
        assert seconds < 2 * TIMEOUT + SLACK
        assert error.dump is not None and f"Flight recorder: {error.dump}" in str(error)
        check_dump(json.loads(Path(error.dump).read_text()), rank, error)


def check_dump(dump: dict[str, Any], rank: int, error: SyncError) -> None:
    assert (dump["version"], dump["rank"], dump["world_size"]) == (1, rank, 3)
    assert dump["error"]["type"] == type(error).__name__
    assert (dump["error"]["rank"], dump["error"]["tensor"]) == (error.rank, "w")
    assert dump["error"]["phase"] == error.phase
    state = dump["state"]
    assert state["step"] == 3
    assert state["active"] == ["w"]
    assert state["waiting"]
    assert all(row["tensor"] == "w" and row["seconds"] >= 0 for row in state["waiting"])
    assert len(state["sent_bytes"]) == len(state["received_bytes"]) == 3
    seen = [event["kind"] for event in dump["events"]]
    assert {"submit", "send", "recv", "decode", "done", "commit"} <= set(seen)
    # By scatter-reduce rank 0 owns the one small tensor: it merges, and encodes nothing of its own.
    assert "encode" in seen or (rank == 0 and "merge" in seen)
    assert seen.count("failure") == 1


def lost_in_the_second_step(leave: Callable[[Synchronizer], None], **options: Any) -> list[SyncError]:
    """What ranks 0 and 1 raise in step 1, which rank 2 leaves them alone with."""
    plan, tensors = Plan({"w": "threelc"}), {"w": TensorSpec((NUMEL,))}
    warm_up([(plan.entry("w", tensors["w"]), torch.float32)])
    after_step_0 = threading.Barrier(3)

    def run(one: Synchronizer) -> SyncError | None:
        take_step(one, 0)
        after_step_0.wait()
        if one.rank == 2:
            leave(one)
            return None
        with pytest.raises(SyncError) as caught:
            take_step(one, 1)
        return caught.value

    with ranks(3, plan, tensors=tensors, **options) as group:
        return group.each(run)[:2]


@pytest.mark.parametrize("time_slots", [False, True])
def test_a_rank_that_closed_early_is_named_long_before_the_stall_timeout(time_slots: bool, tmp_path: Path) -> None:
    begun = time.monotonic()
    options = {"stall_timeout": timedelta(seconds=600), "dump_dir": tmp_path, "time_slots": time_slots}
    for error in lost_in_the_second_step(Synchronizer.close, **options):
        assert error.rank == 2
        assert isinstance(error, (PeerLostError, PeerFailedError))
        assert "has left the group" in str(error)
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("time_slots", [False, True])
def test_a_rank_that_stays_away_is_blamed_on_all_ranks(time_slots: bool, tmp_path: Path) -> None:
    options = {"stall_timeout": timedelta(seconds=3), "dump_dir": tmp_path, "time_slots": time_slots}
    for error in lost_in_the_second_step(lambda _: None, **options):
        assert isinstance(error, (PeerTimeoutError, PeerFailedError))
        assert error.rank == 2
        assert "stall_timeout" in str(error)


def test_exchanges_that_differ_between_ranks_say_what_to_do(tmp_path: Path) -> None:
    with ranks(2, Plan("none"), dump_dir=tmp_path) as group:
        for error in group.outcomes(lambda one: one.exchange(np.ones(2 + one.rank)).wait()):
            assert isinstance(error, SyncError)
            assert "Make the same gradwire calls on every rank, with the same tensors in the same order." in str(error)


@pytest.mark.parametrize("method", ["none", "threelc"])
@pytest.mark.parametrize("submitted", [
    [[("a", 0)], [("a", 50)]],  # ranges of a tensor
    [[("a", 0), ("b", 0)], [("a", 0), ("c", 0)]],
    [[("a", 0), ("b", 0)], [("b", 0), ("a", 0)]],
    [[("a", 0)], [("b", 0)]],
])  # fmt: skip
@pytest.mark.parametrize("min_elements", [0, 1 << 20])  # 0: not fused, if there are several partitions
def test_ranks_that_submit_other_tensors_or_ranges_learn_it_at_once(
    method: str, submitted: list[list[tuple[str, int]]], min_elements: int, tmp_path: Path
) -> None:
    plan = Plan(method, strategy="scatter_reduce", partitions=2, min_elements=min_elements)

    def run(one: Synchronizer) -> None:
        one.begin_step()
        one.submit([GradientSlice(name, torch.ones(50), offset) for name, offset in submitted[one.rank]])
        one.wait()

    tensors, options = {name: TensorSpec((100,)) for name in "abc"}, {"stall_timeout": timedelta(seconds=600)}
    with ranks(2, plan, tensors=tensors, dump_dir=tmp_path, **options) as group:
        for error in group.outcomes(run):
            assert isinstance(error, SyncError)
            assert "Make the same gradwire calls on every rank, with the same tensors in the same order." in str(error)


def test_no_future_stays_open_after_a_failure(tmp_path: Path) -> None:
    waited_for = threading.Barrier(2)

    def run(one: Synchronizer) -> None:
        take_step(one, 0)
        if one.rank == 1:
            waited_for.wait()
            group.network.kill(1)
            return
        futures = [
            one.submit([GradientSlice("w", torch.ones(NUMEL))]),
            one.submit([GradientSlice("b.bias", torch.ones(3)), GradientSlice("c.bias", torch.ones(3))]),
            one.exchange(np.ones(2)),
        ]
        waited_for.wait()
        for future in futures:
            until(future.done)
            with pytest.raises(SyncError) as caught:
                future.wait()
            assert caught.value.rank == 1

    tensors = {"w": TensorSpec((NUMEL,)), "b.bias": TensorSpec((3,)), "c.bias": TensorSpec((3,))}
    with ranks(2, Plan({"w": "threelc", "*": "none"}), tensors=tensors, dump_dir=tmp_path) as group:
        group.each(run)


def test_after_a_failure_residuals_are_as_at_the_last_commit(tmp_path: Path) -> None:
    committed = threading.Barrier(2)

    def run(one: Synchronizer) -> None:
        take_step(one, 0)
        before = one.residuals.state_dict()
        committed.wait()
        if one.rank == 1:
            group.network.kill(1)
            return
        with pytest.raises(SyncError):
            take_step(one, 1)
        assert same(before, one.residuals.state_dict())

    with ranks(2, Plan({"w": "threelc"}), dump_dir=tmp_path) as group:
        group.each(run)


def test_setting_up_leaves_no_more_in_the_store_each_time() -> None:
    store, plan = dist.HashStore(), Plan({"w": "onebit"}, strategy="hierarchical")
    tensors, world_size = {"w": TensorSpec((NUMEL,))}, 3

    def set_up(rank: int) -> None:
        info = GroupInfo(rank, world_size, store, "setting up")
        one = Synchronizer(info, plan, tensors=tensors, options=gw.SyncOptions(timeout=timedelta(seconds=30)))
        measure_links(one)
        assert one.share("words" if rank == 0 else None) == "words"
        one.replan(Plan("none"))
        one.close()

    with ThreadPoolExecutor(world_size) as pool:
        for _ in range(3):
            list(pool.map(set_up, range(world_size), timeout=60))
            assert store.num_keys() == 2 * world_size  # numbers of each rank's latest synchronizer and meeting


# -- the end -------------------------------------------------------------------------------------------------------


def gradwire_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("gradwire-")}


@pytest.mark.parametrize("killed", [False, True])
def test_close_is_idempotent_and_leaves_no_thread(killed: bool, tmp_path: Path) -> None:
    before = gradwire_threads()

    def end(one: Synchronizer) -> None:
        if not killed:
            take_step(one, 1)
        elif one.rank:
            with pytest.raises(SyncError):
                take_step(one, 1)
        one.close()
        one.close()

    with ranks(3, Plan({"w": "threelc"}), dump_dir=tmp_path) as group:
        group.each(lambda one: take_step(one, 0))
        assert len(gradwire_threads() - before) == 6
        if killed:
            group.network.kill(0)
        group.each(end)
        assert gradwire_threads() == before


def test_a_closed_synchronizer_says_so_and_still_reports() -> None:
    def run(one: Synchronizer) -> None:
        take_step(one, 0)
        one.close()
        with pytest.raises(SyncError, match="make a new one to go on"):
            one.submit([GradientSlice("w", torch.zeros(NUMEL))])
        assert one.report().tensors["w"].syncs == 1
        assert held(one).any()

    with ranks(2, Plan({"w": "threelc"})) as group:
        group.each(run)
