"""Gain of rotation, feedback and the table: uniform THC with and without them, and THC. Appendix D.3 and figure 14.

The tasks of `scale` and `loss`, with 4 workers and 4 bits, all methods from the same seeds on the same batches. As in
the paper, `uthc` has one range of levels for the whole gradient, which is rotated as a whole or not at all. The
library's own form has a range for each block of 1,024 elements.

Source: THC (Li et al. 2024), appendix D.3: 4 workers, RoBERTa on SST-2. Differences: those of the tasks; `thc` has the
setting of figure 10, since that of figure 14 is not published.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.options import Cifar10, Seeds, Sst2
from benchmarks.papers.thc import study
from benchmarks.papers.thc.simulated_workers import Aggregator, IntegerSums
from benchmarks.papers.thc.tasks import CIFAR10, SST2
from benchmarks.plotting import figure
from gradwire.compressors import make
from gradwire.compressors.support.homomorphic import Homomorphic

KEY, CHOICES, METRICS = study.KEY, ("seeds",), study.METRICS
RANKS, SEEDS, EPOCHS = 4, 3, {"sst2": 4, "cifar10": 2}
SAMPLES = 4000
WHOLE = 1 << 20  # a block as long as any gradient here
FULL, BLOCKS = "one range", "a range a block"
OPTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "thc": ("thc", {"granularity": 36}, "error"),
    "thc, no feedback": ("thc", {"granularity": 36}, "none"),
}
for where, rotated, plain in (
    (FULL, {"rotate": "full"}, {"rotate": "none", "block": WHOLE}),
    (BLOCKS, {"rotate": "block"}, {"rotate": "none"}),
):
    for rotation, options in (("rotated", rotated), ("not rotated", plain)):
        for feedback, said in (("error", "feedback"), ("none", "no feedback")):
            OPTIONS[f"uthc, {where}: {rotation}, {said}"] = ("uthc", options, feedback)


def aggregator(cell: study.Cell, size: int) -> Aggregator:
    """Aggregator of a cell."""
    if cell.method == study.DENSE:
        return study.dense(cell, size)
    name, options, feedback = OPTIONS[cell.method]
    codec = make(name, **options)
    assert isinstance(codec, Homomorphic), codec
    return IntegerSums(codec, cell.ranks, size, cell.seed, feedback=feedback)


def table(rows: study.Rows) -> str:
    """Markdown table of differences from dense, in percentage points."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    columns = [(task, metric) for task in tasks for metric in METRICS]
    lines = ["| | " + " | ".join(f"{task}: {METRICS[metric]}" for task, metric in columns) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    base = (study.mean_of(rows, task, study.DENSE, RANKS, metric) for task, metric in columns)
    lines.append("| dense, % | " + " | ".join(f"{100 * each:.1f}" for each in base) + " |")
    for method in OPTIONS:
        found = (study.difference(rows, task, method, RANKS, metric) for task, metric in columns)
        lines.append(f"| {method} | " + " | ".join(map(study.plus_minus, found)) + " |")
    return "\n".join(lines)


def plot(rows: study.Rows, folder: Path) -> None:
    """Plot differences from dense for both tasks."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    with figure(folder / "thc-ablation.svg", columns=len(tasks), size=(6 * len(tasks), 4.4)) as axes:
        for axis, task in zip(axes[0], tasks):
            for shift, (metric, title) in zip((-0.12, 0.12), METRICS.items()):
                found = {method: study.difference(rows, task, method, RANKS, metric) for method in OPTIONS}
                study.plot_differences(axis, found, task == tasks[0], shift, label=title)
            study.finish(axis)
            axis.set(xlabel="points above dense", title=task)
        axes[0][0].legend()


def run(
    sst2: Sst2,
    cifar10: Cifar10,
    seeds: Seeds = SEEDS,
    samples: Annotated[int, typer.Option(help="Training images.")] = SAMPLES,
    *,
    done: Set[tuple[str, ...]],
) -> Iterator[dict[str, Any]]:
    """Run all cells that the record does not have."""
    tasks = {"sst2": SST2(sst2, EPOCHS["sst2"]), "cifar10": CIFAR10(cifar10, EPOCHS["cifar10"], samples)}
    cells = [
        study.Cell(task, method, RANKS, seed)
        for seed in range(seeds) for task in tasks for method in (study.DENSE, *OPTIONS)
    ]  # fmt: skip
    yield from study.run(cells, lambda cell: study.measure(cell, tasks[cell.task], aggregator), done)
