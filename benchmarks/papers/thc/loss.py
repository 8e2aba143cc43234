"""Accuracy of THC under packet loss and with stragglers: THC's figures 11 and 16.

    python -m benchmarks.papers.thc.loss --data cifar10              # some minutes: benchmarks/results/thc-loss.csv
    python -m benchmarks.papers.thc.loss --data cifar10 --out FOLDER # and the plot

`--data` is CIFAR-10 as images, see `benchmarks.data.cifar`. Ten workers in one process train a small net, all methods
from the same seeds on the same batches. Trainings that are in the file already are not repeated. What is lost, and what
becomes of it, is in `benchmarks.papers.thc.simulated_workers`; there is no retransmission. Accuracy is the mean over
the workers' own models where packets are lost.

Stragglers: "dropped" is the paper's policy. "kept" leaves a straggler's gradient in its residual and divides by the
gradients that were counted, "kept, over all" by the number of workers.

Source: THC (Li et al. 2024), figures 11 and 16: 10 workers, bits 4, granularity 20, p = 1/512. Differences: a net of 66
thousand parameters (66 packets) on 4,000 images of CIFAR-10 in place of ResNet50 on CIFAR-100, 8 images a worker in
place of 128, and a training of 250 steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
from gradwire.bench.statistics import interval

RESULTS = Path("benchmarks/results/thc-loss.csv")
RANKS, EPOCHS, SAMPLES, SEEDS = 10, 5, 4000, 3
LOSSES = (0.001, 0.01)
LEFT_OUT = {"dropped": LeftOut(), "kept": LeftOut(keep=True), "kept, over all": LeftOut(keep=True, divisor="all")}
THC, SYNCHRONISED = "thc", ", synchronised"
LOSSY = [f"loss {rate:g}{sync}" for rate in LOSSES for sync in ("", SYNCHRONISED)]
LATE = [f"{count} of {RANKS} left out, {policy}" for count in (1, 2, 3) for policy in LEFT_OUT]
METHODS = (THC, *LOSSY, *LATE)
METRICS = {"train_accuracy": "training accuracy", "test_accuracy": "test accuracy"}


def faults(cell: study.Cell) -> tuple[Faults, LeftOut]:
    """What happens to the packets of a cell, and to gradients that are left out."""
    if cell.method in LOSSY:
        return PacketLoss(float(cell.method.removesuffix(SYNCHRONISED).removeprefix("loss ")), cell.seed), LeftOut()
    if cell.method in LATE:
        late, _, policy = cell.method.partition(", ")
        return Stragglers(int(late.split()[0]), cell.seed), LEFT_OUT[policy]
    return Reliable(), LeftOut()


def aggregator(cell: study.Cell, size: int) -> Aggregator:
    """The aggregator of a cell."""
    if cell.method == study.DENSE:
        return study.dense(cell, size)
    on_the_way, left_out = faults(cell)
    codec = homomorphic(granularity=20, p=1 / 512)
    return IntegerSums(codec, cell.ranks, size, cell.seed, faults=on_the_way, left_out=left_out)


def sync(cell: study.Cell) -> EpochSync | None:
    """What workers synchronise after an epoch."""
    return EpochSync() if cell.method.endswith(SYNCHRONISED) else None


def table(rows: study.Rows) -> str:
    """Accuracies, differences from dense in points, and how far replicas are apart, in Markdown."""
    lines = ["| | training, % | difference | test, % | difference | replicas apart, % |", "|---|---|---|---|---|---|"]
    for method in (study.DENSE, *METHODS):
        cells = []
        for metric in METRICS:
            mean, _ = interval(list(study.by_seed(rows, "cifar10", method, RANKS, metric).values()))
            cells.append(f"{100 * mean:.1f}")
            cells.append(study.plus_minus(study.difference(rows, "cifar10", method, RANKS, metric)))
        apart, _ = interval(list(study.by_seed(rows, "cifar10", method, RANKS, "replicas_apart").values()))
        lines.append(f"| {method} | {' | '.join(cells)} | {f'{100 * apart:.1f}' if apart else ''} |")
    return "\n".join(lines)


def plot(rows: study.Rows, path: Path) -> None:
    """Differences from dense: packet loss, then stragglers."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    for axis, (metric, title) in zip(axes, METRICS.items()):
        found = [study.difference(rows, "cifar10", method, RANKS, metric) for method in METHODS]
        colours = ["#444444"] + ["#c1440e" if method in LOSSY else "#2f6db5" for method in METHODS[1:]]
        for place, ((mean, half), colour) in enumerate(zip(found, colours)):
            axis.errorbar(mean, place, xerr=half, marker="o", markersize=5, capsize=3, color=colour)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(METHODS)), METHODS if axis is axes[0] else [""] * len(METHODS), fontsize=8)
        axis.invert_yaxis()
        axis.grid(axis="y", linewidth=0.3)
        axis.set(xlabel=f"{title}, points above dense")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = study.parser(__doc__, RESULTS, SEEDS)
    parser.add_argument("--data", type=Path, help="folder or tar of CIFAR-10 as images")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="training images")
    arguments = parser.parse_args(argv)
    study.prepare(arguments)
    if not arguments.plot_only:
        if arguments.data is None:
            parser.error("Expected --data with CIFAR-10 as images.")
        from benchmarks.papers.thc.cifar_small import CIFAR10

        task = CIFAR10(arguments.data, arguments.epochs, arguments.samples)
        cells = [
            study.Cell(task.name, method, RANKS, seed)
            for seed in range(arguments.seeds) for method in (study.DENSE, *METHODS)
        ]  # fmt: skip
        study.record("thc-loss", cells, lambda cell: study.measure(cell, task, aggregator, sync(cell)), arguments.csv)
    rows = study.read(arguments.csv)
    print(table(rows))
    if arguments.out:
        plot(rows, arguments.out / "thc-loss.svg")
        print(f"Plot: {(arguments.out / 'thc-loss.svg').resolve()}")


if __name__ == "__main__":
    main()
