"""Accuracy by number of workers, of THC, top-k and QSGD at the same compression ratio: THC's figure 10.

`--data` is a folder of SST-2, see `benchmarks.data.sst2`. 4 to 64 workers in one process train bags of words from
scratch, all methods from the same seeds on the same batches: once with trained word vectors, whose gradients are mostly
zeros, and once with fixed random vectors, so that all gradients are dense.

Ratios: each worker sends 4 bits per element, and slightly more for norms. The sum comes back in integers that hold 36
n, with 8 bits for 4 workers and 16 for more. Top-k keeps as many elements as fit in the same bytes, in both directions.
QSGD has 4 bits to the aggregator and 8 bits back, its maximum. The mean that both encode again has a residual if
gradients have one. Errors of means are measured along a dense training, on the same gradients for all methods, without
residuals.

Source: THC (Li et al. 2024), figure 10: bits 4, granularity 36, p = 1/32, 8 sentences per worker. Differences: models
with 50 thousand parameters without pretraining instead of BERT and RoBERTa, so 4 epochs instead of 2; in addition to
the paper's setting, `thc` with the table that the library chooses for the number of ranks ("thc, chosen", the default),
and with p chosen, too ("thc, p chosen", p=None).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.options import Seeds, Sst2
from benchmarks.papers.thc import study
from benchmarks.papers.thc.simulated_training import Task, train
from benchmarks.papers.thc.simulated_workers import Aggregator, Dense, IntegerSums, Reencoded
from benchmarks.papers.thc.tasks import SST2
from benchmarks.plotting import figure, legend_below
from gradwire.compressors import make
from gradwire.compressors.support.homomorphic import Homomorphic
from gradwire.core.spec import TensorSpec

KEY, CHOICES = study.KEY, ("seeds",)
RANKS = (4, 8, 16, 32, 64)
EPOCHS, SEEDS = 4, 8
THC, CHOSEN, P_CHOSEN, TOPK, QSGD = "thc", "thc, chosen", "thc, p chosen", "topk", "qsgd"
METHODS = (THC, CHOSEN, P_CHOSEN, TOPK, QSGD)
ERRORS, LOOKED_AT = "errors", 8  # interval in steps
TASKS = ("sst2", "sst2, fixed words")
METRICS = {"train_accuracy": "training accuracy", "test_accuracy": "held-out accuracy"}


def homomorphic(**options: object) -> Homomorphic:
    """`thc` with options."""
    codec = make("thc", **options)
    assert isinstance(codec, Homomorphic), codec
    return codec


@functools.cache
def ratio_for(size: int, bits: float) -> float:
    """The largest ratio of top-k, in thousandths, whose payload takes at most `bits` bits per element."""
    spec = TensorSpec((size,))
    fits = [
        each for each in range(1, 1001) if 8 * make("topk", ratio=each / 1000).max_encoded_bytes(spec) <= bits * size
    ]  # fmt: skip
    return max(fits) / 1000


def aggregator(cell: study.Cell, size: int) -> Aggregator:
    """Aggregator of a cell."""
    paper = IntegerSums(homomorphic(granularity=36), cell.ranks, size, cell.seed)
    if cell.method in (CHOSEN, P_CHOSEN):
        codec = homomorphic() if cell.method == CHOSEN else homomorphic(p=None)
        return IntegerSums(codec, cell.ranks, size, cell.seed)
    if cell.method == TOPK:
        codecs = (make("topk", ratio=ratio_for(size, bits)) for bits in (paper.bits_there, paper.bits_back))
        return Reencoded(*codecs, cell.ranks, size, cell.seed)
    if cell.method == QSGD:
        return Reencoded(make("qsgd", bits=4), make("qsgd", bits=8), cell.ranks, size, cell.seed)
    return paper if cell.method == THC else study.dense(cell, size)


class Errors(Dense):
    """Trains without compression, and measures the errors of all methods, without feedback, at regular steps.

    Attributes:
        nmse: Errors by method.
        agreement: n ‖mean‖² over the mean of ‖gradient‖²: n for copies, 1 for orthogonal gradients.
    """

    def __init__(self, cell: study.Cell) -> None:
        super().__init__(cell.ranks)
        self.cell = cell
        self.nmse: dict[str, list[float]] = {method: [] for method in METHODS}
        self.agreement: list[float] = []

    def means(self, grads: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
        """See `Aggregator`."""
        exact = super().means(grads, step)
        if step % LOOKED_AT == 0:
            length = float(exact[0].double().square().sum())
            each = statistics.fmean(float(grad.double().square().sum()) for grad in grads)
            self.agreement.append(self.num_workers * length / each)
            for method, found in self.nmse.items():
                cell = dataclasses.replace(self.cell, method=method)
                mean = aggregator(cell, len(exact[0])).means(grads, step)[0]
                found.append(float((mean.double() - exact[0].double()).square().sum()) / length)
        return exact


def errors(cell: study.Cell, task: Task) -> Iterator[dict[str, Any]]:
    """Cell that measures the errors of means during a dense training."""
    watched = Errors(cell)
    steps = len(train(task, watched, cell.seed).losses)
    fixed = {**dataclasses.asdict(cell), "steps": steps, "size": task.size, "source": "measured", "unit": "ratio"}
    yield {**fixed, "metric": "agreement", "value": statistics.fmean(watched.agreement)}
    for method, found in watched.nmse.items():
        yield {**fixed, "metric": f"nmse {method}", "value": statistics.fmean(found), "samples": len(found)}


def table(rows: study.Rows) -> str:
    """Markdown tables of differences from dense in percentage points and of errors of means, for each task."""
    return "\n\n".join(_table(rows, task) for task in TASKS)


def _table(rows: study.Rows, task: str) -> str:
    lines = [f"{task}:", ""]
    for metric, title in METRICS.items():
        lines += [f"| {title}, % | dense | {' | '.join(METHODS)} |", "|---|---|" + "---|" * len(METHODS)]
        for ranks in RANKS:
            base = study.mean_of(rows, task, study.DENSE, ranks, metric)
            cells = [study.plus_minus(study.difference(rows, task, method, ranks, metric)) for method in METHODS]
            lines.append(f"| {ranks} workers | {100 * base:.1f} | {' | '.join(cells)} |")
        lines.append("")
    measured = [each for each in METHODS if study.by_seed(rows, task, ERRORS, RANKS[0], f"nmse {each}")]
    lines += [f"| NMSE of a mean | agreement | {' | '.join(measured)} |", "|---|---|" + "---|" * len(measured)]
    for ranks in RANKS:
        metrics = ("agreement", *(f"nmse {method}" for method in measured))
        found = (study.mean_of(rows, task, ERRORS, ranks, each) for each in metrics)
        lines.append(f"| {ranks} workers | {' | '.join(f'{value:.3g}' for value in found)} |")
    return "\n".join(lines)


def plot(rows: study.Rows, folder: Path) -> None:
    """Plot differences from dense against the number of workers, with one row of plots for each task."""
    with figure(folder / "thc-scale.svg", len(TASKS), 2, (11, 4 * len(TASKS)), sharex=True) as axes:
        for line, task in zip(axes, TASKS):
            for axis, (metric, title) in zip(line, METRICS.items()):
                for shift, method in enumerate(METHODS):
                    means, halves = zip(*(study.difference(rows, task, method, ranks, metric) for ranks in RANKS))
                    places = [ranks * 1.04 ** (shift - 2) for ranks in RANKS]
                    axis.errorbar(places, means, halves, marker="o", markersize=4, capsize=3, label=method)
                axis.axhline(0, color="black", linewidth=0.8)
                axis.set_xscale("log", base=2)
                axis.set_xticks(RANKS, map(str, RANKS))
                axis.set(title=task, ylabel=f"{title}, points above dense")
        for axis in axes[-1]:
            axis.set_xlabel("workers")
        legend_below(axes[0, 0])


def run(
    data: Sst2,
    seeds: Seeds = SEEDS,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = EPOCHS,
    *,
    done: Set[tuple[str, ...]],
) -> Iterator[dict[str, Any]]:
    """Run all cells that the record does not have."""
    tasks = {task.name: task for task in (SST2(data, epochs, each) for each in (True, False))}
    cells = [
        study.Cell(task, method, ranks, seed)
        for task in TASKS for seed in range(seeds) for ranks in RANKS
        for method in (study.DENSE, *METHODS, ERRORS)
    ]  # fmt: skip

    def figures_of(cell: study.Cell) -> Iterator[dict[str, Any]]:
        task = tasks[cell.task]
        return errors(cell, task) if cell.method == ERRORS else study.measure(cell, task, aggregator)

    yield from study.run(cells, figures_of, done)
