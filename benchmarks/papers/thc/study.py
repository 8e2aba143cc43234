"""What the studies of THC with simulated workers share: cells of a table, and the file they are written to.

A cell is one training. It is written down as soon as it is done, and not trained again when the command is repeated.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.papers.thc.simulated_training import EpochSync, Task, train
from benchmarks.papers.thc.simulated_workers import Aggregator, Dense
from gradwire.bench.records import write_figures
from gradwire.bench.statistics import interval

Rows = list[dict[str, str]]
MORE_COLUMNS = ("task", "seed", "steps")
DENSE = "dense"


@dataclass(frozen=True)
class Cell:
    """One training."""

    task: str
    method: str
    ranks: int
    seed: int


AggregatorOf = Callable[[Cell, int], Aggregator]
"""The aggregator of a cell, for a gradient of so many elements."""


def dense(cell: Cell, size: int) -> Aggregator:
    """That of the baseline."""
    return Dense(cell.ranks)


def measure(
    cell: Cell, task: Task, aggregator_of: AggregatorOf, sync: EpochSync | None = None
) -> Iterator[dict[str, Any]]:
    """Train one cell; its figures."""
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


def record(
    benchmark: str, cells: Iterable[Cell], figures_of: Callable[[Cell], Iterable[dict[str, Any]]], path: Path
) -> Rows:
    """Train the cells of which the file has nothing, and give all that it has then."""
    rows: list[Any] = read(path) if path.exists() else []
    done = {tuple(row[key] for key in asdict(Cell("", "", 0, 0))) for row in rows}
    for cell in cells:
        if tuple(map(str, asdict(cell).values())) not in done:
            figures = list(figures_of(cell))
            said = ", ".join(f"{each['metric']} {each['value']:.4g}" for each in figures)
            print(f"{cell.task} {cell.method}, {cell.ranks} workers, seed {cell.seed}: {said}", flush=True)
            rows += figures
            write_figures(benchmark, rows, path, more_columns=MORE_COLUMNS)
    return read(path)


def read(path: Path) -> Rows:
    """All rows of a file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def by_seed(rows: Rows, task: str, method: str, ranks: int, metric: str) -> dict[str, float]:
    """A metric of one method, by seed."""
    wanted = {"task": task, "method": method, "ranks": str(ranks), "metric": metric}
    return {row["seed"]: float(row["value"]) for row in rows if all(row[key] == value for key, value in wanted.items())}


def difference(rows: Rows, task: str, method: str, ranks: int, metric: str) -> tuple[float, float]:
    """Points of accuracy above dense, of pairs with the same seed: mean and half of the interval."""
    own, base = (by_seed(rows, task, each, ranks, metric) for each in (method, DENSE))
    return interval([100 * (own[seed] - base[seed]) for seed in own if seed in base])


def plus_minus(found: tuple[float, float]) -> str:
    """A difference in a table."""
    return f"{found[0]:+.2f} ± {found[1]:.2f}"


def parser(description: str | None, path: Path, seeds: int) -> argparse.ArgumentParser:
    """The options that all studies have."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--seeds", type=int, default=seeds)
    found.add_argument("--csv", type=Path, default=path)
    found.add_argument("--out", type=Path, help="folder for the plot")
    found.add_argument("--plot-only", action="store_true", help="train nothing, and read the figures from --csv")
    return found


def prepare(arguments: argparse.Namespace) -> None:
    """One thread, and matplotlib where a plot is wanted."""
    torch.set_num_threads(1)
    if arguments.out:
        from gradwire.bench.extras import need

        need("matplotlib", extra="report", purpose="the plot")
