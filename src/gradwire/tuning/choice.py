"""The choice among timed candidates, and the record of a decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gradwire.planner import PlanTable
from gradwire.planner.costs import Costs
from gradwire.planner.table import seconds
from gradwire.tuning.candidates import KINDS, Candidate

MIN_GAIN = 0.01  # share by which DDP's all-reduce in fp16 must be faster than a candidate of higher fidelity
MIN_PLAN_GAIN = 0.05  # the same for a plan, whose steps vary more
NATIVE_DOUBT = 1.5  # predictions for DDP's own all-reduce were seen to be a third too long


class Timed(Protocol):
    """Something that was timed: a candidate, or a row of a result."""

    @property
    def kind(self) -> str:
        """One of `gradwire.tuning.candidates.KINDS`."""


C = TypeVar("C", bound=Timed)


def fidelity_of(candidate: Timed) -> int:
    """Rank a candidate by what it does to gradients: the higher, the less."""
    return -KINDS.index(candidate.kind)


def choose(steps: Mapping[C, float], margin: Callable[[C], float], least: float = 0.0) -> C:
    """Return the candidate of the highest fidelity that none of lower fidelity beats by its margin.

    Args:
        steps: Seconds of a step by candidate. Among candidates of one fidelity the first wins, unless another beats it.
        margin: Share by which a candidate must be faster than one of higher fidelity, because timings vary.
        least: Seconds of a step without communication, if they are known. No step counts as shorter.
    """

    def is_beaten(candidate: C) -> bool:
        rivals = (other for other in steps if fidelity_of(other) <= fidelity_of(candidate))
        return any((1 + margin(rival)) * max(least, steps[rival]) < steps[candidate] for rival in rivals)

    return max((candidate for candidate in steps if not is_beaten(candidate)), key=fidelity_of)


def margin(candidate: Candidate) -> float:
    """Share by which a candidate must be faster than one of higher fidelity."""
    return MIN_PLAN_GAIN if candidate.gradwire else MIN_GAIN


def worth_a_trial(candidate: Candidate, predicted: float, fastest: float, is_queued: bool = False) -> bool:
    """Whether a candidate may turn out faster than the fastest that was timed.

    A plan is slower than predicted more often than not, DDP's own all-reduce faster. The latter has the higher
    fidelity and must not lose by a prediction alone.

    Args:
        candidate: The candidate.
        predicted: Predicted seconds of a step.
        fastest: Seconds of a step by the fastest so far.
        is_queued: Whether the predictions rest on means that counted as arrived when they were queued, as on an
            accelerator. They contain the time of DDP's all-reduce then, and only a trial tells.
    """
    return is_queued or predicted < fastest * (1.0 if candidate.gradwire else NATIVE_DOUBT)


@dataclass(frozen=True)
class Decision:
    """A decision of `auto`, and the figures behind it.

    Attributes:
        step: First step of the synchronizer for which it holds.
        reason: Why it was time to decide.
        chosen: The candidate that was chosen.
        predicted: Predicted seconds of a step by candidate.
        measured: Measured seconds of a step by candidate that was tried.
        table: The planner's proposal.
        costs: Costs that it was planned with.
    """

    step: int
    reason: str
    chosen: Candidate
    predicted: dict[Candidate, float]
    measured: dict[Candidate, float]
    table: PlanTable
    costs: Costs

    @property
    def baseline(self) -> Candidate:
        """What is in use while nothing has been chosen."""
        return next(iter(self.predicted))

    def __str__(self) -> str:
        measured = "; ".join(f"{each.name} {seconds(value)}" for each, value in self.measured.items())
        predicted = "; ".join(f"{each.name} {seconds(value)}" for each, value in self.predicted.items())
        link = self.costs.slowest
        return (
            f"Step {self.step}, {self.reason}: {self.chosen.name}. A step measured: {measured}; predicted: {predicted}."
            f" Slowest link: {8e-9 / link.seconds_per_byte:.3g} Gb/s, {seconds(link.latency)}."
        )
