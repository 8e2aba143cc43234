"""Trials: the steps of a candidate, timed in the same way within a training (`auto`) and outside (`gradwire probe`).

A trial is a script: a generator that lets one step pass at each `yield`. `auto` resumes it at the beginning of each
backward pass of the user's, `run_steps` between steps that it runs itself. All ranks run the same script.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np

from gradwire.tuning.candidates import Candidate
from gradwire.tuning.step_clock import StepTiming, Timing, typical

TURN_SECONDS = 1.0
TURN_STEPS = 40  # most steps of a turn
WARM_UP = 2  # steps after a switch: DDP rebuilds its buckets after the first

T = TypeVar("T")
Script = Generator[None, None, T]


class StepRunner(Protocol):
    """How steps are run: by the user's training, or by replaying a batch."""

    @property
    def last(self) -> StepTiming:
        """The step that has passed."""

    def switch(self, candidate: Candidate) -> Script[None]:
        """Average gradients by another candidate from the next step on."""


@dataclass
class Trials:
    """Times candidates. All ranks get the same figures.

    Attributes:
        runner: How steps are run.
        largest: Returns the largest of all ranks' numbers, position by position.
        max_steps: Most steps that are timed of a candidate.
        max_seconds: Seconds after which no more steps are timed. Slow steps are timed once.
        timings: What was timed so far.
    """

    runner: StepRunner
    largest: Callable[[np.ndarray], np.ndarray]
    max_steps: int
    max_seconds: float
    timings: dict[Candidate, Timing] = field(default_factory=dict)

    def run(self, candidate: Candidate) -> Script[None]:
        """Switch to a candidate and time it. Of two trials the shorter step counts: other work only adds time."""
        yield from self.runner.switch(candidate)
        timing = yield from self.time()
        self.timings[candidate] = min(self.timings.get(candidate, timing), timing, key=lambda each: each.step)

    def compare(
        self, within: float, turns: range, pick: Callable[[Mapping[Candidate, float]], Candidate]
    ) -> Script[None]:
        """Time the fastest candidates again, in turns of about a second, until it is clear which one to pick.

        The speed of a machine drifts, but hardly within a turn. So the first candidate's step is its median over the
        turns, and that of another one follows from the median of its ratios to the first.

        Args:
            within: Share by which steps of a candidate may be longer than the shortest.
            turns: Numbers of turns after which it may be clear; the last one ends it.
            pick: Returns the candidate to pick by seconds of a step.
        """
        longest = (1 + within) * min(timing.step for timing in self.timings.values())
        close = [candidate for candidate, timing in self.timings.items() if timing.step <= longest]
        if len(close) < 2:
            return
        found: dict[Candidate, list[Timing]] = {candidate: [] for candidate in close}
        ratios: dict[Candidate, list[float]] = {}
        for turn in range(1, turns[-1] + 1):
            for candidate in close[:: (-1) ** (turn - 1)]:
                yield from self.runner.switch(candidate)
                found[candidate].append((yield from self._time(1, TURN_STEPS, TURN_SECONDS)))
            for candidate, timings in found.items():
                both = zip(timings, found[close[0]], strict=True)
                ratios[candidate] = [timing.step / first.step for timing, first in both]
            if turn in turns and _is_clear(ratios, pick):
                break
        usual = statistics.median(timing.step for timing in found[close[0]])
        for candidate, timings in found.items():
            ratio = statistics.median_low(ratios[candidate])
            self.timings[candidate] = replace(timings[ratios[candidate].index(ratio)], step=usual * ratio)

    def time(self, warm_up: int = WARM_UP) -> Script[Timing]:
        """Time steps of the current candidate, after some that are not timed."""
        return (yield from self._time(warm_up, self.max_steps, self.max_seconds))

    def _time(self, warm_up: int, max_steps: int, max_seconds: float) -> Script[Timing]:
        for _ in range(warm_up + 1):
            yield
        steps = [self.runner.last]
        seconds = max(1e-9, float(self.largest(np.array([steps[0].seconds]))[0]))
        # Ranks do not exchange anything before the last of these steps, so that they wait for each other as usual.
        for _ in range(min(max_steps, math.ceil(max_seconds / seconds)) - 1):
            yield
            steps.append(self.runner.last)
        return Timing.of(steps, self.largest(typical(steps)))


def _is_clear(
    ratios: Mapping[Candidate, Sequence[float]], pick: Callable[[Mapping[Candidate, float]], Candidate]
) -> bool:
    """Whether one candidate is picked whatever the true medians of the ratios are, within their bounds."""
    bounds = [_median_bounds(each) for each in ratios.values()]
    picked = {pick(dict(zip(ratios, medians, strict=True))) for medians in itertools.product(*bounds)}
    return len(picked) == 1


def _median_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return bounds that hold the true median in over 92 of 100 cases, whatever the distribution.

    The number of values below the median is binomial: half of them, give or take the square root (two standard
    deviations).
    """
    skipped = max(0, int(len(values) / 2 - math.sqrt(len(values))))
    ordered = sorted(values)
    return ordered[skipped], ordered[-1 - skipped]


def run_steps(script: Script[T], step: Callable[[], object]) -> T:
    """Run a script to its end, with a step at each `yield`."""
    while True:
        try:
            next(script)
        except StopIteration as end:
            result: T = end.value
            return result
        step()
