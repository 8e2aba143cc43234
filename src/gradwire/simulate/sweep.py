"""Steps of one model over methods, numbers of ranks and rates, as rows."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.compressors.base.registry import compressor_of, spec_of
from gradwire.core.errors import UnknownNameError
from gradwire.planner.costs import Costs
from gradwire.simulate.cluster import Cluster
from gradwire.simulate.served import SERVER
from gradwire.simulate.step import step
from gradwire.simulate.workload import SimulatedModel
from gradwire.sync.plan import Plan
from gradwire.sync.strategies import STRATEGIES


class SweepMethod(NamedTuple):
    """A compressor, and how it travels.

    Attributes:
        spec: Name and options, such as ``"threelc:sparsity=1.5"``.
        strategy: Strategy; None for the one that `Plan` takes.
        partitions: Ranges that a tensor is cut into; None for those that `Plan` takes.
    """

    spec: str
    strategy: str | None = None
    partitions: int | None = None

    @classmethod
    def parse(cls, text: str, strategy: str | None = None, partitions: int | None = None) -> SweepMethod:
        """Parse ``SPEC`` or ``SPEC@STRATEGY``. `strategy` applies if the text names none.

        Raises:
            UnknownNameError: The strategy does not exist.
        """
        spec, _, named = text.partition("@")
        found = named or strategy
        if found is not None and found not in STRATEGIES:
            raise UnknownNameError("strategy", found, STRATEGIES)
        if found == SERVER and compressor_of(spec).exact:
            found = None  # a server adds none of these, and plans let them travel between ranks
        return cls(spec, found, partitions)

    @property
    def canonical(self) -> str:
        """The compressor's name in measured costs."""
        return spec_of(compressor_of(self.spec))

    def plan(self) -> Plan:
        """A plan that sends all tensors by this method."""
        return Plan(compressor_of(self.spec), strategy=self.strategy, partitions=self.partitions)

    @property
    def label(self) -> str:
        """Compressor and strategy, as shown to readers."""
        return self.spec if self.strategy is None else f"{self.spec} {self.strategy}"


@dataclass(frozen=True)
class SweepRow:
    """One simulated step.

    Attributes:
        model: Name of the model.
        method: Compressor with its options.
        strategy: Strategy; "" for the plan's own choice.
        ranks: Number of ranks.
        rate_bits: Rate of the link in bits per second; None for a link that takes no time.
        step_seconds: Time of the step.
        compute_seconds: Time of the step without communication.
        ideal_seconds: The larger of `compute_seconds` and the time that the busiest link needs for its bytes, those
            within nodes and the server's included.
        efficiency: `compute_seconds` over `step_seconds`.
        sent_bytes: Bytes of frames that a rank sends.
        split: The longest chain of waiting by cause, as in `StepResult.split`.
        processor: Share of the step in which the busiest rank encodes, merges and decodes.
        folded: Whether one rank stood for many.
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
        """Compressor and strategy, as shown to readers."""
        return SweepMethod(self.method, self.strategy or None).label

    def flat(self) -> dict[str, Any]:
        """The row as one level of plain values."""
        values = asdict(self)
        return values | {f"{cause}_seconds_waited": seconds for cause, seconds in values.pop("split").items()}


def sweep(
    model: SimulatedModel,
    methods: Sequence[SweepMethod],
    clusters: Iterable[Cluster],
    costs: Costs,
    *,
    fold: bool | None = None,
    on_row: Callable[[SweepRow], None] = lambda row: None,
) -> list[SweepRow]:
    """Simulate a step of the model by every method on every cluster.

    Args:
        model: Gradients and compute times.
        methods: Methods, in the order of the rows of one cluster.
        clusters: Clusters, in the order of the rows.
        costs: Measured costs.
        fold: As in `step`.
        on_row: Called after each step.
    """
    rows = []
    for cluster in clusters:
        for method in methods:
            rows.append(_row(model, method, cluster, costs, fold))
            on_row(rows[-1])
    return rows


def _row(model: SimulatedModel, method: SweepMethod, cluster: Cluster, costs: Costs, fold: bool | None) -> SweepRow:
    result = step(model, method.plan(), cluster, costs, fold=fold)
    ends = [*result.ranks, *([result.server] if result.server else [])]
    busiest = max(max(use.egress, use.ingress, use.inner) * use.seconds for use in ends)
    return SweepRow(
        model.name,
        method.spec,
        method.strategy or "",
        cluster.ranks,
        cluster.link.rate_bits,
        result.seconds,
        result.compute_seconds,
        max(result.compute_seconds, busiest),
        result.efficiency,
        result.sent_bytes,
        result.split,
        max(use.processor for use in result.ranks),
        result.folded,
    )


def write_csv(rows: Sequence[SweepRow], path: str | Path) -> None:
    """Write the rows to a CSV file, one column per value."""
    records = [row.flat() for row in rows]
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, records[0].keys())
        writer.writeheader()
        writer.writerows(records)
