"""The norm watch: what is a jump, and what every rank reports of one."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.core.errors import DisagreementError, OptionError
from gradwire.core.events import Event, EventStream
from gradwire.core.spec import TensorSpec
from gradwire.sync.norm_watch import MIN_RATIO, MIN_SAMPLES, NormJump, NormStatistics, NormWatch
from gradwire.sync.plan import Plan
from gradwire.sync.submission import GradientSlice
from gradwire.sync.synchronizer import Synchronizer
from tests.sync.harness import ranks

TENSORS = 5


def usual(generator: np.random.Generator, world_size: int) -> np.ndarray:
    """Norms of one step, float64[W, T]: all ranks share the size of each tensor, and differ by about a tenth."""
    level = 10.0 ** generator.integers(-6, 3, TENSORS)
    return level * np.exp(0.1 * generator.standard_normal((world_size, TENSORS)))


def trained(generator: np.random.Generator, world_size: int, steps: int = 20) -> NormStatistics:
    statistics = NormStatistics(world_size, TENSORS)
    for _ in range(steps):
        statistics.learn(usual(generator, world_size))
    return statistics


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_a_jump_has_the_rank_the_tensor_and_the_factor(world_size: int, factor: float) -> None:
    generator = np.random.default_rng(0)
    statistics = NormStatistics(world_size, TENSORS)
    for _ in range(20):  # of equal steps, so that two ranks can tell which of them has changed
        statistics.learn(np.exp(0.1 * generator.standard_normal((world_size, TENSORS))))
    for rank in range(world_size):
        norms = np.exp(0.1 * generator.standard_normal((world_size, TENSORS)))
        assert statistics.judge(norms) == []
        norms[rank, 3] *= factor
        (jump,) = statistics.judge(norms)
        assert jump == NormJump(rank, 3, pytest.approx(factor, rel=0.6))


def test_what_all_ranks_see_is_no_jump() -> None:
    generator = np.random.default_rng(1)
    statistics = trained(generator, 4)
    assert statistics.judge(1e6 * usual(generator, 4)) == []
    assert statistics.judge(1e-20 * usual(generator, 4)) == []


def test_what_is_usual_for_a_rank_is_no_jump() -> None:
    """Ranks with other data, and tensors whose norms vary much."""
    generator = np.random.default_rng(2)
    statistics = NormStatistics(4, TENSORS)
    own = np.array([1.0, 30.0, 1.0, 0.02])[:, None]
    for step in range(200):
        norms = usual(generator, 4) * own
        norms[:, 0] *= np.exp(2 * generator.standard_normal(4))
        if step >= 32:
            assert statistics.judge(norms) == [], step
        statistics.learn(norms)
    norms = usual(generator, 4) * own
    norms[1, 1] /= 1000
    assert [jump[:2] for jump in statistics.judge(norms)] == [(1, 1)]


def test_nothing_is_judged_before_there_are_samples() -> None:
    generator = np.random.default_rng(3)
    statistics = NormStatistics(3, TENSORS)
    for step in range(MIN_SAMPLES + 1):
        norms = usual(generator, 3)
        norms[0, 0] *= 1e6
        assert bool(statistics.judge(norms)) == (step == MIN_SAMPLES)
        statistics.learn(usual(generator, 3))


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_unused_tensors_and_values_that_are_not_finite_are_left_to_others(value: float) -> None:
    generator = np.random.default_rng(4)
    statistics = trained(generator, 3)
    for _ in range(100):
        norms = usual(generator, 3)
        norms[:, 2] = 1.0, 1e9, value
        assert statistics.judge(norms) == []
        statistics.learn(norms)
    norms = usual(generator, 3)
    assert statistics.judge(norms) == [], "nothing was learned of them"
    norms[0, 2] *= 100
    assert [jump[:2] for jump in statistics.judge(norms)] == [(0, 2)]


def test_equal_data_on_all_ranks_leaves_room_for_rounding() -> None:
    statistics = NormStatistics(4, 1)
    for _ in range(50):
        statistics.learn(np.ones((4, 1)))
    assert statistics.judge(np.array([[1.0], [1.0], [1.0], [0.9 * MIN_RATIO]])) == []
    assert statistics.judge(np.array([[1.0], [1.0], [1.0], [1.1 * MIN_RATIO]])) != []


def test_a_broken_rank_does_not_become_usual_soon() -> None:
    generator = np.random.default_rng(5)
    statistics = trained(generator, 4, steps=100)
    for step in range(16):
        norms = usual(generator, 4)
        norms[2] *= 1e4
        assert [jump[:2] for jump in statistics.judge(norms)] == [(2, tensor) for tensor in range(TENSORS)], step
        statistics.learn(norms)


# -- norms ---------------------------------------------------------------------------------------------------------


def test_norms_are_wide_enough_and_add_up_over_slices() -> None:
    watch = NormWatch(4, 0, EventStream())
    ids = {name: index for index, name in enumerate(["half", "huge", "double", "sliced", "unused", "bad", "empty"])}
    watch.take(
        8,
        [
            GradientSlice("half", torch.full((64,), 60000.0, dtype=torch.float16)),
            GradientSlice("huge", torch.full((64,), 3e38)),
            GradientSlice("double", torch.full((4,), 1.5, dtype=torch.float64)),
            GradientSlice("sliced", torch.full((16,), 1.0)),
            GradientSlice("bad", torch.full((16,), torch.nan)),
            GradientSlice("empty", torch.empty(0, 3)),
        ],
    )
    watch.take(8, [GradientSlice("sliced", torch.ones(3, 3).t(), offset=16)])
    found = watch.norms(8, ids)
    assert found[0] == pytest.approx(8 * 60000)
    assert 1e19 < found[1] < np.inf
    assert found[[2, 3, 4, 6]].tolist() == [3.0, 5.0, 0.0, 0.0]
    assert np.isnan(found[5])
    assert not watch.norms(12, ids).any(), "of another step"
    watch.discard()
    assert not watch.norms(8, ids).any()


# -- reports -------------------------------------------------------------------------------------------------------

SPECS = {f"w{index}": TensorSpec((20, 10)) for index in range(70)}  # more than one exchange


def take_step(one: Synchronizer, step: int, factors: dict[str, float] | None = None) -> None:
    generator = torch.Generator().manual_seed(1000 * one.rank + step)
    grads = {name: torch.randn(spec.shape, generator=generator) for name, spec in SPECS.items()}
    for name, factor in (factors or {}).items():
        grads[name] *= factor
    one.begin_step()
    one.submit([GradientSlice(name, grad) for name, grad in grads.items()])
    one.commit()


def jumps(one: Synchronizer) -> list[tuple[int, str, int | None]]:
    one.wait()
    found = [event for event in one.events.latest() if event.kind == "norm_jump"]
    return [(event.detail["step"], event.tensor, event.peer) for event in sorted(found, key=lambda each: each.tensor)]


@pytest.mark.parametrize(("world_size", "method"), [(4, "threelc"), (2, "none")])
def test_every_rank_reports_a_jump_and_one_warns(world_size: int, method: str, caplog: Any) -> None:
    broken = world_size - 1

    def run(one: Synchronizer) -> Any:
        for step in range(1, 44):
            bad = one.rank == broken and step in (36, 37, 38, 40)
            take_step(one, step, {"w2": 1e4, "w68": 1e-4} if bad else None)
        exchanges = [event for event in one.events.latest() if event.kind == "submit" and event.tensor == "norms"]
        return jumps(one), one.report().notes, len(exchanges)

    caplog.set_level(logging.WARNING, logger="gradwire")
    with ranks(world_size, Plan({"w*": method}), tensors=SPECS, watch_norms=2) as group:
        found = group.each(run)
    events, notes, num_exchanges = found[0]
    assert events == [(step, name, broken) for name in ("w2", "w68") for step in (36, 38, 40)]
    assert num_exchanges == 2 * (42 // 2), "two per watched step"
    assert len(notes) == 1 and f"2 tensors of rank {broken} jumped 6 times" in notes[0] and "in step 40" in notes[0]
    assert all(each == found[0] for each in found)
    warnings = [record.getMessage() for record in caplog.records if "do not look like" in record.getMessage()]
    assert len(warnings) == 2 and all(f"rank {broken}" in each for each in warnings)
    assert any("'w2' had" in each for each in warnings) and any("'w68' had" in each for each in warnings)


def test_a_step_that_is_rolled_back_is_not_judged() -> None:
    def run(one: Synchronizer) -> None:
        for step in range(1, 30):
            bad = {"w2": 1e4, "w3": torch.nan} if one.rank == 1 and step == 20 else None
            take_step(one, step, bad)
        assert jumps(one) == []
        assert "rollback" in [event.kind for event in one.events.latest()]

    with ranks(3, Plan({"w*": "threelc"}), tensors=SPECS, watch_norms=1) as group:
        group.each(run)


def test_without_the_option_nothing_is_exchanged() -> None:
    def run(one: Synchronizer) -> list[Event]:
        for step in range(1, 5):
            take_step(one, step, {"w2": 1e4})
        return [event for event in one.events.latest() if event.tensor == "norms"]

    with ranks(2, Plan("none"), tensors=SPECS) as group:
        assert group.each(run) == [[], []]
    with ranks(1, Plan("none"), tensors=SPECS, watch_norms=1) as group:
        assert group.each(run) == [[]], "a single rank has nobody to compare with"


def test_values_are_checked_and_agreed_on() -> None:
    with pytest.raises(OptionError, match=r"at least 0, but it is -1. Pass 16"):
        gw.SyncOptions(watch_norms=-1)
    with pytest.raises(DisagreementError, match="watch_norms"), ranks(2, "none", watch_norms=lambda rank: 4 * rank):
        pass
