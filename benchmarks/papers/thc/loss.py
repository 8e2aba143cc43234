"""Accuracy of THC with packet loss and with stragglers: THC's figures 11 and 16.

`--data` is CIFAR-10 as images, see `benchmarks.data.cifar`. Ten workers in one process train a small net, all methods
from the same seeds on the same batches. `benchmarks.papers.thc.simulated_workers` describes what is lost, and the
consequences; there is no retransmission. With packet loss, accuracy is the mean over the workers' own models.

Stragglers: "dropped" is the paper's policy. "kept" leaves a straggler's gradient in its residual and divides by the
gradients that were counted, "kept, over all" by the number of workers.

Source: THC (Li et al. 2024), figures 11 and 16: 10 workers, bits 4, granularity 20, p = 1/512. Differences: a net with
66 thousand parameters (66 packets) on 4,000 images of CIFAR-10 instead of ResNet50 on CIFAR-100, 8 images per worker
instead of 128, and a training of 250 steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.options import Cifar10, Seeds
from benchmarks.papers.thc import study
from benchmarks.papers.thc.scale import homomorphic
from benchmarks.papers.thc.simulated_training import EpochSync
from benchmarks.papers.thc.simulated_workers import (
    Aggregator,
    Faults,
    IntegerSums,
    LeftOut,
    PacketLoss,
    Reliable,
    Stragglers,
)
from benchmarks.papers.thc.tasks import CIFAR10
from benchmarks.plotting import figure

KEY, CHOICES, METRICS = study.KEY, ("seeds",), study.METRICS
RANKS, EPOCHS, SAMPLES, SEEDS = 10, 5, 4000, 3
LOSSES = (0.001, 0.01)
LEFT_OUT = {"dropped": LeftOut(), "kept": LeftOut(keep=True), "kept, over all": LeftOut(keep=True, divisor="all")}
THC, SYNCHRONIZED = "thc", ", synchronized"
LOSSY = [f"loss {rate:g}{sync}" for rate in LOSSES for sync in ("", SYNCHRONIZED)]
LATE = [f"{count} of {RANKS} left out, {policy}" for count in (1, 2, 3) for policy in LEFT_OUT]
METHODS = (THC, *LOSSY, *LATE)


def faults(cell: study.Cell) -> tuple[Faults, LeftOut]:
    """What happens to the packets of a cell, and to gradients that are left out."""
    if cell.method in LOSSY:
        return PacketLoss(float(cell.method.removesuffix(SYNCHRONIZED).removeprefix("loss ")), cell.seed), LeftOut()
    if cell.method in LATE:
        late, _, policy = cell.method.partition(", ")
        return Stragglers(int(late.split()[0]), cell.seed), LEFT_OUT[policy]
    return Reliable(), LeftOut()


def aggregator(cell: study.Cell, size: int) -> Aggregator:
    """Aggregator of a cell."""
    if cell.method == study.DENSE:
        return study.dense(cell, size)
    on_the_way, left_out = faults(cell)
    codec = homomorphic(granularity=20, p=1 / 512)
    return IntegerSums(codec, cell.ranks, size, cell.seed, faults=on_the_way, left_out=left_out)


def sync(cell: study.Cell) -> EpochSync | None:
    """What workers synchronize after an epoch."""
    return EpochSync() if cell.method.endswith(SYNCHRONIZED) else None


def table(rows: study.Rows) -> str:
    """Markdown table of accuracies, differences from dense in percentage points, and distances between replicas."""
    lines = ["| | training, % | difference | test, % | difference | replicas apart, % |", "|---|---|---|---|---|---|"]
    for method in (study.DENSE, *METHODS):
        cells = []
        for metric in METRICS:
            cells.append(f"{100 * study.mean_of(rows, 'cifar10', method, RANKS, metric):.1f}")
            cells.append(study.plus_minus(study.difference(rows, "cifar10", method, RANKS, metric)))
        apart = study.mean_of(rows, "cifar10", method, RANKS, "replicas_apart")
        lines.append(f"| {method} | {' | '.join(cells)} | {f'{100 * apart:.1f}' if apart else ''} |")
    return "\n".join(lines)


def plot(rows: study.Rows, folder: Path) -> None:
    """Plot differences from dense: THC alone, under packet loss, and with stragglers."""
    groups = (("#444444", (THC,)), ("#c1440e", LOSSY), ("#2f6db5", LATE))
    with figure(folder / "thc-loss.svg", columns=2, size=(12, 4.4)) as axes:
        for axis, (metric, title) in zip(axes[0], METRICS.items()):
            first = 0
            for color, methods in groups:
                found = {method: study.difference(rows, "cifar10", method, RANKS, metric) for method in methods}
                study.plot_differences(axis, found, False, first, color=color)
                first += len(methods)
            axis.set_yticks(range(len(METHODS)), METHODS if axis is axes[0][0] else [""] * len(METHODS), fontsize=8)
            study.finish(axis)
            axis.set(xlabel=f"{title}, points above dense")


def run(
    data: Cifar10,
    seeds: Seeds = SEEDS,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = EPOCHS,
    samples: Annotated[int, typer.Option(help="Training images.")] = SAMPLES,
    *,
    done: Set[tuple[str, ...]],
) -> Iterator[dict[str, Any]]:
    """Run all cells that the record does not have."""
    task = CIFAR10(data, epochs, samples)
    cells = [
        study.Cell(task.name, method, RANKS, seed) for seed in range(seeds) for method in (study.DENSE, *METHODS)
    ]  # fmt: skip
    yield from study.run(cells, lambda cell: study.measure(cell, task, aggregator, sync(cell)), done)
