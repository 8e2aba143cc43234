"""Trials, with a runner whose steps have known times."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from gradwire.tuning.candidates import Candidate
from gradwire.tuning.step_clock import BucketTiming, StepTiming, typical
from gradwire.tuning.trials import WARM_UP, Script, Trials, _median_bounds, run_steps

ONE, OTHER = Candidate("one"), Candidate("other")


class ScriptedSteps:
    """Steps of given seconds; a switch takes one of them."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.switched: list[Candidate] = []
        self.last = StepTiming()

    def switch(self, candidate: Candidate) -> Script[None]:
        self.switched.append(candidate)
        yield

    def step(self) -> None:
        self.last = StepTiming([BucketTiming(("w",), 8, 0.25, 0.75)], self.seconds.pop(0))


def fastest(steps: Mapping[Candidate, float]) -> Candidate:
    return min(steps, key=lambda candidate: steps[candidate])


def trials(runner: ScriptedSteps, max_steps: int = 3, max_seconds: float = 10.0) -> Trials:
    return Trials(runner, lambda mine: mine, max_steps, max_seconds)


def test_neither_the_switch_nor_warm_up_is_timed() -> None:
    runner = ScriptedSteps(*[100.0] * (1 + WARM_UP), 1.0, 2.0, 6.0, 50.0)
    found = trials(runner)
    run_steps(found.run(ONE), runner.step)
    timing = found.timings[ONE]
    assert (timing.step, timing.num_steps, runner.seconds) == (1.5, 3, [50.0])
    assert (timing.rest, timing.busy, timing.synchronizing) == (1.25, 0.5, 0.5)
    assert (timing.buckets, timing.nbytes) == ((BucketTiming(("w",), 8, 0.25),), 8)


@pytest.mark.parametrize(("seconds", "expected"), [(0.1, 1), (1.0, 1), (1.5, 2)])
def test_slow_steps_are_timed_for_a_given_time_and_at_least_once(seconds: float, expected: int) -> None:
    runner = ScriptedSteps(*[1.0] * 10)
    timing = run_steps(trials(runner, max_seconds=seconds).time(), runner.step)
    assert timing.num_steps == expected


def test_the_slowest_rank_says_how_long_steps_take() -> None:
    runner = ScriptedSteps(*[1.0] * 10)
    timing = run_steps(Trials(runner, lambda mine: 4 * mine, 8, 10.0).time(warm_up=0), runner.step)
    assert (timing.num_steps, timing.step) == (3, 4.0)


def test_ranks_exchange_nothing_between_steps_that_are_timed_but_after_the_first() -> None:
    runner = ScriptedSteps(*[1.0] * 10)
    left: list[int] = []

    def largest(mine: np.ndarray) -> np.ndarray:
        left.append(len(runner.seconds))
        return mine

    timing = run_steps(Trials(runner, largest, 8, 10.0).time(warm_up=2), runner.step)
    assert timing.num_steps == 8
    assert left == [10 - 2 - 1, 0]


def test_of_two_trials_the_shorter_step_counts() -> None:
    runner = ScriptedSteps(*[2.0] * 6, *[9.0] * 6, *[1.0] * 6, *[3.0] * 6)
    found = trials(runner)
    for candidate in (ONE, OTHER, ONE, ONE):
        run_steps(found.run(candidate), runner.step)
    assert runner.switched == [ONE, OTHER, ONE, ONE]
    assert {candidate: timing.step for candidate, timing in found.timings.items()} == {ONE: 1.0, OTHER: 9.0}


def test_a_step_is_a_mean_without_those_that_held_something_else() -> None:
    in_turns = [StepTiming(seconds=seconds) for seconds in (1.0, 3.0) * 4]
    assert typical(in_turns)[0] == 2.0
    evaluated = [StepTiming(seconds=seconds) for seconds in (1.0, 1.0, 1.0, 90.0)]
    assert typical(evaluated)[0] == 1.0


def test_close_candidates_are_timed_again_in_turns_and_compared_within_each() -> None:
    third = Candidate("third")
    # Trials: the first one has luck, and the third is too slow to be close.
    steps = [1.0] * 6 + [1.1] * 6 + [1.2] * 6
    # Each turn: switching, one step of warm-up, a timed one. The machine is slow during the second turn.
    turns = [(ONE, 1.3), (OTHER, 1.04), (OTHER, 2.0), (ONE, 2.4), (ONE, 1.2), (OTHER, 1.2)]
    runner = ScriptedSteps(*steps, *(seconds for _, seconds in turns for _ in range(3)))
    found = trials(runner)
    for candidate in (ONE, OTHER, third):
        run_steps(found.run(candidate), runner.step)
    run_steps(found.compare(0.15, range(3, 4), fastest), runner.step)
    assert runner.switched[3:] == [candidate for candidate, _ in turns]
    steps_of = {candidate: timing.step for candidate, timing in found.timings.items()}
    assert steps_of == pytest.approx({ONE: 1.3, OTHER: 1.3 * 2.0 / 2.4, third: 1.2})  # ratios 0.8, 0.83, 1.0
    assert runner.seconds == []


@pytest.mark.parametrize(
    ("ratios", "turns"),
    [
        ([0.8, 0.9, 0.95, 0.99], 3),  # all agree
        ([0.8, 0.9, 1.1, 0.9, 0.8, 0.9, 0.95, 0.9, 0.9], 8),  # one of eight may be chance, one of seven is not
        ([0.8, 1.2] * 6, 9),  # never clear
    ],
)
def test_turns_go_on_until_it_is_clear_which_candidate_to_pick(ratios: list[float], turns: int) -> None:
    lengths = [(1.0, ratio) if turn % 2 == 0 else (ratio, 1.0) for turn, ratio in enumerate(ratios)]
    steps = [seconds for pair in lengths for step in pair for seconds in [step] * (2 + math.ceil(1 / step))]
    runner = ScriptedSteps(*[1.0] * 12, *steps)
    found = trials(runner)
    for candidate in (ONE, OTHER):
        run_steps(found.run(candidate), runner.step)
    run_steps(found.compare(0.15, range(3, 10), fastest), runner.step)
    assert len(runner.switched) == 2 + 2 * turns


def test_bounds_of_a_median_hold_it_in_92_of_100_cases() -> None:
    for count in range(5, 12):
        orders = np.random.default_rng(count).random((20_000, count))
        bounds = [_median_bounds(values) for values in orders.tolist()]
        assert np.mean([low <= 0.5 <= high for low, high in bounds]) > 0.92


@pytest.mark.parametrize(("seconds", "expected"), [(0.001, 40), (0.1, 10), (3.0, 1)])
def test_a_turn_takes_about_a_second(seconds: float, expected: int) -> None:
    runner = ScriptedSteps(*[seconds] * 1000)
    found = trials(runner)
    for candidate in (ONE, OTHER):
        run_steps(found.run(candidate), runner.step)
    left = len(runner.seconds)
    run_steps(found.compare(0.15, range(1, 2), fastest), runner.step)
    assert left - len(runner.seconds) == 2 * (1 + 1 + expected)
    assert {timing.num_steps for timing in found.timings.values()} == {expected}


def test_what_is_far_from_the_others_is_not_timed_again() -> None:
    runner = ScriptedSteps(*[1.0] * 6, *[1.2] * 6)
    found = trials(runner)
    for candidate in (ONE, OTHER):
        run_steps(found.run(candidate), runner.step)
    run_steps(found.compare(0.15, range(3, 4), fastest), runner.step)
    assert runner.switched == [ONE, OTHER]


def test_steps_with_other_buckets_than_the_last_do_not_count() -> None:
    first = StepTiming([BucketTiming(("a",), 4, 0.0), BucketTiming(("b",), 4, 9.0)], 90.0)
    last = StepTiming([BucketTiming(("a", "b"), 8, 2.0)], 10.0)
    assert typical([first, last]).tolist() == typical([last]).tolist()
    assert np.shape(typical([first, last])) == (8,)
