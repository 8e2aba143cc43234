"""Shared by the studies of THC with simulated workers. A cell is one training, and a part of the record."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.intervals import interval
from benchmarks.keys import Row, key_of
from benchmarks.papers.thc.simulated_training import EpochSync, Task, train
from benchmarks.papers.thc.simulated_workers import Aggregator, Dense

KEY = ("task", "method", "ranks", "seed")
Rows = Sequence[Row]
METRICS = {"train_accuracy": "training accuracy", "test_accuracy": "test accuracy"}
DENSE = "dense"


@dataclass(frozen=True)
class Cell:
    """One training."""

    task: str
    method: str
    ranks: int
    seed: int


AggregatorOf = Callable[[Cell, int], Aggregator]
"""The aggregator of a cell, for a gradient with this number of elements."""


def dense(cell: Cell, size: int) -> Aggregator:
    """The cell of the baseline."""
    return Dense(cell.ranks)


def measure(
    cell: Cell, task: Task, aggregator_of: AggregatorOf, sync: EpochSync | None = None
) -> Iterator[dict[str, Any]]:
    """Train one cell and return its figures."""
    aggregator = aggregator_of(cell, task.size)
    found = train(task, aggregator, cell.seed, sync)
    last = found.losses[-len(found.losses) // task.num_epochs :]
    fixed = {**asdict(cell), "size": task.size, "dtype": "float32", "steps": len(found.losses), "source": "measured"}
    for split, value in found.accuracy.items():
        yield {**fixed, "metric": f"{split}_accuracy", "value": value, "unit": "share"}
    yield {**fixed, "metric": "last_epoch_loss", "value": statistics.fmean(last), "unit": "nats"}
    yield {**fixed, "metric": "replicas_apart", "value": found.apart, "unit": "ratio"}
    for metric, value in (("bits_there", aggregator.bits_there), ("bits_back", aggregator.bits_back)):
        yield {**fixed, "metric": metric, "value": value, "unit": "bit"}


def run(
    cells: Iterable[Cell], figures_of: Callable[[Cell], Iterable[Row]], done: Set[tuple[str, ...]]
) -> Iterator[Row]:
    """Train the cells that the record does not have."""
    for cell in cells:
        if key_of(asdict(cell), KEY) not in done:
            figures = list(figures_of(cell))
            said = ", ".join(f"{each['metric']} {each['value']:.4g}" for each in figures)
            print(f"{cell.task} {cell.method}, {cell.ranks} workers, seed {cell.seed}: {said}", flush=True)
            yield from figures


def by_seed(rows: Rows, task: str, method: str, ranks: int, metric: str) -> dict[int, float]:
    """Values of a metric for one method, by seed."""
    wanted = {"task": task, "method": method, "ranks": ranks, "metric": metric}
    return {row["seed"]: row["value"] for row in rows if all(row[key] == value for key, value in wanted.items())}


def difference(
    rows: Rows, task: str, method: str, ranks: int, metric: str, control: str = DENSE
) -> tuple[float, float]:
    """Accuracy above a control in percentage points, over pairs with the same seed: mean and half of the interval."""
    own, base = (by_seed(rows, task, each, ranks, metric) for each in (method, control))
    return interval([100 * (own[seed] - base[seed]) for seed in own if seed in base])


def plus_minus(found: tuple[float, float]) -> str:
    """Format a difference for a table."""
    return f"{found[0]:+.2f} ± {found[1]:.2f}"


def mean_of(rows: Rows, task: str, method: str, ranks: int, metric: str) -> float:
    """Mean of a metric over seeds."""
    return interval(list(by_seed(rows, task, method, ranks, metric).values()))[0]


def plot_differences(
    axis: Any, found: Mapping[str, tuple[float, float]], names: bool, shift: float = 0.0, **style: Any
) -> None:
    """Plot points above dense and their intervals, one line for each method."""
    means, halves = zip(*found.values())
    places = [place + shift for place in range(len(found))]
    axis.errorbar(means, places, xerr=halves, fmt="o", markersize=5, capsize=3, **style)
    axis.set_yticks(range(len(found)), list(found) if names else [""] * len(found), fontsize=8)


def finish(axis: Any) -> None:
    """Apply the common style of axes: a line for dense at zero, and the first method on top."""
    axis.axvline(0, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.grid(axis="y", linewidth=0.3)
