"""What `auto` chooses among, what it times, and what it writes down of each decision."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradwire.planner import PlanTable
from gradwire.planner.costs import Costs
from gradwire.planner.table import seconds


@dataclass(frozen=True)
class Candidate:
    """How gradients travel.

    Attributes:
        name: for people.
        gradwire: by gradwire; else by DDP's own all-reduce.
        half: DDP's own all-reduce of values rounded to fp16.
        choices: of a plan, by tensor: compressor, strategy, partitions.
        table: the plan.
    """

    name: str
    gradwire: bool = False
    half: bool = False
    choices: tuple[tuple[str, str, int], ...] = ()
    table: PlanTable | None = field(default=None, compare=False)

    @classmethod
    def of(cls, table: PlanTable) -> Candidate:
        """The way of a plan."""
        specs = sorted({row.spec for row in table.rows if row.spec != "none"})
        choices = tuple((row.spec, row.strategy, row.partitions) for row in table.rows)
        return cls(f"gradwire, {' and '.join(specs) or 'dense'}", gradwire=True, choices=choices, table=table)

    @property
    def faithfulness(self) -> int:
        """The lower, the less is rounded or held back."""
        return -1 * self.half if not self.gradwire else -2 * (self.table is not None and self.table.compresses)


NATIVE = Candidate("DDP's all-reduce")
NATIVE_FP16 = Candidate("DDP's all-reduce in fp16", half=True)
GIVE_OUT = Candidate("gradwire, giving out residuals", gradwire=True)


@dataclass(frozen=True)
class Timing:
    """Figures of some steps, the same on all ranks: of each rank the median, of all ranks the largest.

    Attributes:
        step: seconds of a step.
        rest: of it, when neither backward nor synchronization runs.
        busy: in which buckets were under way.
        synchronizing: in which each bucket was under way, added up.
        link: in which gradwire's frames were under way, added up over peers; 0 by DDP's own all-reduce.
        buckets: names of the parameters of each bucket, and when it was ready.
        nbytes: of all buckets.
    """

    step: float
    rest: float
    busy: float
    synchronizing: float
    link: float
    buckets: tuple[tuple[tuple[str, ...], float], ...]
    nbytes: int

    @property
    def backward(self) -> float:
        return max((ready for _, ready in self.buckets), default=0.0)


@dataclass(frozen=True)
class Decision:
    """What was decided, and by which figures.

    Attributes:
        step: the synchronizer's step from which on it holds.
        reason: why it was time to decide.
        way: what was chosen.
        predicted: seconds of a step by each way that was considered.
        measured: seconds of a step by each way that was tried.
        table: the planner's proposal.
        costs: what it was planned with.
    """

    step: int
    reason: str
    way: Candidate
    predicted: dict[Candidate, float]
    measured: dict[Candidate, float]
    table: PlanTable
    costs: Costs

    def __str__(self) -> str:
        tried = "; ".join(f"{way.name} {seconds(value)}" for way, value in self.measured.items())
        guessed = "; ".join(f"{way.name} {seconds(value)}" for way, value in self.predicted.items())
        link = self.costs.slowest
        return (
            f"Step {self.step}, {self.reason}: {self.way.name}. A step measured: {tried}; predicted: {guessed}. "
            f"Slowest link: {8e-9 / link.seconds_per_byte:.3g} Gb/s, {seconds(link.latency)}."
        )
