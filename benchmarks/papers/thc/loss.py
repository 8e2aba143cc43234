"""Accuracy of THC with packet loss and with stragglers: THC's figures 11 and 16.

`--data` is CIFAR-10 as images, see `benchmarks.data.cifar`. Ten workers in one process train a small net, all methods
from the same seeds on the same batches. `benchmarks.papers.thc.simulated_workers` describes what is lost, and the
consequences; there is no retransmission. With packet loss, accuracy is the mean over the workers' own models.

Stragglers: "dropped" is the paper's policy. "kept" leaves a straggler's gradient in its residual and divides by the
gradients that were counted, "kept, over all" by the number of workers.

Each of these has a control ("dense, ..."): no compression, with the same packets lost or the same workers left out in
the same steps. The difference from its control is what THC costs under these faults.

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
    DenseSums,
    Faults,
    IntegerSums,
    LeftOut,
    PacketLoss,
    Reliable,
    Stragglers,
)
from benchmarks.papers.thc.tasks import CIFAR10
from benchmarks.plotting import figure, legend_below

KEY, CHOICES, METRICS = study.KEY, ("seeds",), study.METRICS
RANKS, EPOCHS, SAMPLES, SEEDS = 10, 5, 4000, 3
LOSSES = (0.001, 0.01)
LEFT_OUT = {"dropped": LeftOut(), "kept": LeftOut(keep=True), "kept, over all": LeftOut(keep=True, divisor="all")}
THC, SYNCHRONIZED = "thc", ", synchronized"
LOSSY = [f"loss {rate:g}{sync}" for rate in LOSSES for sync in ("", SYNCHRONIZED)]
LATE = [f"{count} of {RANKS} left out, {policy}" for count in (1, 2, 3) for policy in LEFT_OUT]
CONTROL = f"{study.DENSE}, "
CONTROLS = {THC: study.DENSE} | {method: CONTROL + method for method in (*LOSSY, *LATE)}
METHODS = (*CONTROLS, *list(CONTROLS.values())[1:])


def faults(cell: study.Cell) -> tuple[Faults, LeftOut]:
    """What happens to the packets of a cell, and to gradients that are left out."""
    method = cell.method.removeprefix(CONTROL)
    if method in LOSSY:
        return PacketLoss(float(method.removesuffix(SYNCHRONIZED).removeprefix("loss ")), cell.seed), LeftOut()
    if method in LATE:
        late, _, policy = method.partition(", ")
        return Stragglers(int(late.split()[0]), cell.seed), LEFT_OUT[policy]
    return Reliable(), LeftOut()


def aggregator(cell: study.Cell, size: int) -> Aggregator:
    """Aggregator of a cell."""
    on_the_way, left_out = faults(cell)
    if cell.method in CONTROLS.values():
        return DenseSums(cell.ranks, size, faults=on_the_way, left_out=left_out)
    codec = homomorphic(granularity=20, p=1 / 512)
    return IntegerSums(codec, cell.ranks, size, cell.seed, faults=on_the_way, left_out=left_out)


def sync(cell: study.Cell) -> EpochSync | None:
    """What workers synchronize after an epoch."""
    return EpochSync() if cell.method.endswith(SYNCHRONIZED) else None


def table(rows: study.Rows) -> str:
    """Markdown tables of accuracies above dense without faults in percentage points, for THC and its controls."""
    return "\n\n".join([*(_table(rows, metric, title) for metric, title in METRICS.items()), _distances(rows)])


def _table(rows: study.Rows, metric: str, title: str) -> str:
    base = study.mean_of(rows, "cifar10", study.DENSE, RANKS, metric)
    lines = [f"| {title}, dense {100 * base:.1f} % | dense | thc | thc, from dense |", "|---|---|---|---|"]
    for method, control in CONTROLS.items():
        pairs = ((control, study.DENSE), (method, study.DENSE), (method, control))
        found = (study.difference(rows, "cifar10", of, RANKS, metric, base) for of, base in pairs)
        lines.append(f"| {_label(method)} | {' | '.join(map(study.plus_minus, found))} |")
    return "\n".join(lines)


def _label(method: str) -> str:
    return "no faults" if method == THC else method


def _distances(rows: study.Rows) -> str:
    lines = ["| replicas apart, % | dense | thc |", "|---|---|---|"]
    for method in LOSSY:
        each = (study.mean_of(rows, "cifar10", of, RANKS, "replicas_apart") for of in (CONTROLS[method], method))
        lines.append(f"| {method} | {' | '.join(f'{100 * apart:.1f}' for apart in each)} |")
    return "\n".join(lines)


def plot(rows: study.Rows, folder: Path) -> None:
    """Plot accuracy above dense without faults, of THC and of its controls."""
    series = (("#c1440e", "thc", CONTROLS), ("#444444", "dense", CONTROLS.values()))
    with figure(folder / "thc-loss.svg", columns=2, size=(12, 4.8)) as axes:
        for axis, (metric, title) in zip(axes[0], METRICS.items()):
            for shift, (color, label, methods) in enumerate(series):
                found = {method: study.difference(rows, "cifar10", method, RANKS, metric) for method in methods}
                study.plot_differences(axis, found, False, 0.3 * shift, color=color, label=label)
            names = map(_label, CONTROLS) if axis is axes[0][0] else [""] * len(CONTROLS)
            axis.set_yticks(range(len(CONTROLS)), names, fontsize=8)
            study.finish(axis)
            axis.set(xlabel=f"{title}, points above dense without faults")
        legend_below(axes[0, 0])


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
