"""Steps of one model over methods, numbers of ranks and rates, as rows."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.compressors.base.registry import compressor_of, spec_of
from gradwire.core.errors import UnknownNameError
from gradwire.planner.costs import Costs
from gradwire.simulate.bulk import Bulk
from gradwire.simulate.cluster import Cluster, Compute, SimulatedLink, Straggler
from gradwire.simulate.models import ModelShape
from gradwire.simulate.result import StepResult
from gradwire.simulate.step import gradients_of, step
from gradwire.sync.plan import Plan
from gradwire.sync.strategies import peer_strategies


class SweepMethod(NamedTuple):
    """A compressor, and how it travels.

    Attributes:
        spec: as ``"threelc:sparsity=1.5"``.
        strategy: None for the one that `Plan` takes.
    """

    spec: str
    strategy: str | None = None

    @classmethod
    def parse(cls, text: str, strategy: str | None = None) -> SweepMethod:
        """From ``SPEC`` or ``SPEC@STRATEGY``; `strategy` where the text names none.

        Raises:
            UnknownNameError: a strategy that there is not between ranks, which alone are simulated.
        """
        spec, _, named = text.partition("@")
        found = named or strategy
        if found is not None and found not in peer_strategies():
            raise UnknownNameError("strategy between ranks", found, peer_strategies())
        return cls(spec, found)

    @property
    def canonical(self) -> str:
        """The compressor as costs are named."""
        return spec_of(compressor_of(self.spec))

    def plan(self, partitions: int = 1) -> Plan:
        """All tensors by this method."""
        return Plan(compressor_of(self.spec), strategy=self.strategy, partitions=partitions)

    @property
    def label(self) -> str:
        """How a reader sees it."""
        return self.spec if self.strategy is None else f"{self.spec} {self.strategy}"


@dataclass(frozen=True)
class Scenario:
    """What is simulated, but for what changes from row to row.

    Attributes:
        model: its gradients.
        compute: times of a rank.
        costs: measured costs.
        link: of each rank or node; its rate is what the sweep sets.
        ranks_per_node, inner, stragglers, cores: as in `Cluster`.
        partitions: as in `Plan`.
        fold, bulk, bucket_bytes: as in `step`.
    """

    model: ModelShape
    compute: Compute
    costs: Costs
    link: SimulatedLink
    ranks_per_node: int = 1
    inner: SimulatedLink = field(default_factory=lambda: SimulatedLink(None))
    stragglers: Mapping[int, Straggler] = field(default_factory=dict)
    cores: int | None = None
    partitions: int = 1
    fold: bool | None = None
    bulk: Bulk | None = None
    bucket_bytes: float | None = None

    def cluster(self, ranks: int, rate_bits: float | None) -> Cluster:
        """The machines of one row."""
        link = replace(self.link, rate_bits=rate_bits)
        return Cluster(ranks, link, self.ranks_per_node, self.inner, self.stragglers, self.cores)

    def run(self, method: SweepMethod, ranks: int, rate_bits: float | None, *, trace: bool = False) -> StepResult:
        """One step."""
        gradients = gradients_of(self.model, self.compute.backward_seconds)
        how: dict[str, Any] = {"fold": self.fold, "bulk": self.bulk, "trace": trace, "bucket_bytes": self.bucket_bytes}
        return step(
            gradients, method.plan(self.partitions), self.cluster(ranks, rate_bits), self.costs, self.compute, **how
        )


@dataclass(frozen=True)
class SweepRow:
    """One simulated step.

    Attributes:
        model, method, strategy, ranks: what was simulated; strategy is "" for the plan's own choice.
        rate_bits: of the link; None where it takes no time.
        step_seconds: the step.
        compute_seconds: the same without communication.
        ideal_seconds: the larger of that and the time that the busiest link needs for its bytes.
        efficiency: compute over step.
        sent_bytes: frames that a rank sends.
        split: the longest chain by cause, as `StepResult.split`.
        processor: share of the step in which the busiest rank's processor encodes, merges and decodes.
        folded: whether one rank stood for many.
    """

    model: str
    method: str
    strategy: str
    ranks: int
    rate_bits: float | None
    step_seconds: float
    compute_seconds: float
    ideal_seconds: float
    efficiency: float
    sent_bytes: float
    split: dict[str, float]
    processor: float
    folded: bool

    @property
    def label(self) -> str:
        """Method and strategy."""
        return SweepMethod(self.method, self.strategy or None).label


def sweep(
    scenario: Scenario,
    methods: Sequence[SweepMethod],
    ranks: Iterable[int],
    rates_bits: Iterable[float | None],
    on_row: Callable[[SweepRow], None] = lambda row: None,
) -> list[SweepRow]:
    """Simulate every method at every rate with every number of ranks."""
    rates, rows = list(rates_bits), []
    for count in ranks:
        for rate in rates:
            for method in methods:
                rows.append(_row(scenario, method, count, rate))
                on_row(rows[-1])
    return rows


def _row(scenario: Scenario, method: SweepMethod, ranks: int, rate_bits: float | None) -> SweepRow:
    result = scenario.run(method, ranks, rate_bits)
    busiest = max((max(use.egress, use.ingress) * use.seconds for use in result.ranks), default=0.0)
    return SweepRow(
        scenario.model.name,
        method.spec,
        method.strategy or "",
        ranks,
        rate_bits,
        result.seconds,
        result.compute_seconds,
        max(result.compute_seconds, busiest),
        result.efficiency,
        result.sent_bytes,
        result.split,
        max(use.processor for use in result.ranks),
        result.folded,
    )


def plain(row: SweepRow) -> dict[str, Any]:
    """A row as one level of plain values."""
    values = asdict(row)
    return values | {f"{cause}_seconds_waited": seconds for cause, seconds in values.pop("split").items()}


def write_csv(rows: Sequence[SweepRow], path: str | Path) -> None:
    """Write the rows, a column a value."""
    records = [plain(row) for row in rows]
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, records[0].keys())
        writer.writeheader()
        writer.writerows(records)
