"""The choice among timed candidates, and the record of a decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gradwire.planner import PlanTable
from gradwire.planner.costs import Costs
from gradwire.planner.table import seconds
from gradwire.tuning.candidates import KINDS, Candidate


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
