"""What rotation, feedback and the table gain: uniform THC with and without them, and THC: appendix D.3 and figure 14.

    python -m benchmarks.papers.thc.ablation --sst2 FOLDER --cifar10 FOLDER  # benchmarks/results/thc-ablation.csv
    python -m benchmarks.papers.thc.ablation --sst2 FOLDER --cifar10 FOLDER --out FOLDER # and the plot

The tasks of `benchmarks.papers.thc.scale` and `benchmarks.papers.thc.loss`, by 4 workers with 4 bits, all methods from
the same seeds on the same batches. Trainings that are in the file already are not repeated. As in the paper `uthc` has
one range of levels for the whole gradient, rotated whole or not at all; beside it the library's, with a range for each
block of 1,024.

Source: THC (Li et al. 2024), appendix D.3: 4 workers, RoBERTa on SST-2. Differences: those of the tasks; for `thc` the
setting of figure 10, since that of figure 14 is not published.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers.thc import study
from benchmarks.papers.thc.simulated_workers import Aggregator, IntegerSums
from gradwire.bench.statistics import interval
from gradwire.compressors import make
from gradwire.compressors.support.homomorphic import Homomorphic

RESULTS = Path("benchmarks/results/thc-ablation.csv")
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
METRICS = {"train_accuracy": "training accuracy", "test_accuracy": "test accuracy"}


def aggregator(cell: study.Cell, size: int) -> Aggregator:
    """The aggregator of a cell."""
    if cell.method == study.DENSE:
        return study.dense(cell, size)
    name, options, feedback = OPTIONS[cell.method]
    codec = make(name, **options)
    assert isinstance(codec, Homomorphic), codec
    return IntegerSums(codec, cell.ranks, size, cell.seed, feedback=feedback)


def table(rows: study.Rows) -> str:
    """Differences from dense in points, in Markdown."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    columns = [(task, metric) for task in tasks for metric in METRICS]
    lines = ["| | " + " | ".join(f"{task}: {METRICS[metric]}" for task, metric in columns) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    base = (list(study.by_seed(rows, task, study.DENSE, RANKS, metric).values()) for task, metric in columns)
    lines.append("| dense, % | " + " | ".join(f"{100 * interval(each)[0]:.1f}" for each in base) + " |")
    for method in OPTIONS:
        found = (study.difference(rows, task, method, RANKS, metric) for task, metric in columns)
        lines.append(f"| {method} | " + " | ".join(map(study.plus_minus, found)) + " |")
    return "\n".join(lines)


def plot(rows: study.Rows, path: Path) -> None:
    """Differences from dense of both tasks."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(6 * len(tasks), 4.4), layout="constrained", squeeze=False)
    for axis, task in zip(axes[0], tasks):
        for shift, (metric, title) in zip((-0.12, 0.12), METRICS.items()):
            means, halves = zip(*(study.difference(rows, task, method, RANKS, metric) for method in OPTIONS))
            places = [place + shift for place in range(len(OPTIONS))]
            axis.errorbar(means, places, xerr=halves, fmt="o", markersize=5, capsize=3, label=title)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(OPTIONS)), OPTIONS if task == tasks[0] else [""] * len(OPTIONS), fontsize=8)
        axis.invert_yaxis()
        axis.grid(axis="y", linewidth=0.3)
        axis.set(xlabel="points above dense", title=task)
    axes[0][0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = study.parser(__doc__, RESULTS, SEEDS)
    parser.add_argument("--sst2", type=Path, help="folder of SST-2")
    parser.add_argument("--cifar10", type=Path, help="folder or tar of CIFAR-10 as images")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="training images")
    arguments = parser.parse_args(argv)
    study.prepare(arguments)
    if not arguments.plot_only:
        if arguments.sst2 is None or arguments.cifar10 is None:
            parser.error("Expected --sst2 and --cifar10 with the data.")
        from benchmarks.papers.thc.cifar_small import CIFAR10
        from benchmarks.papers.thc.sst2 import SST2

        tasks = {"sst2": SST2(arguments.sst2, EPOCHS["sst2"])}
        tasks["cifar10"] = CIFAR10(arguments.cifar10, EPOCHS["cifar10"], arguments.samples)
        cells = [
            study.Cell(task, method, RANKS, seed)
            for seed in range(arguments.seeds) for task in tasks for method in (study.DENSE, *OPTIONS)
        ]  # fmt: skip
        measure = lambda cell: study.measure(cell, tasks[cell.task], aggregator)  # noqa: E731
        study.record("thc-ablation", cells, measure, arguments.csv)
    rows = study.read(arguments.csv)
    print(table(rows))
    if arguments.out:
        plot(rows, arguments.out / "thc-ablation.svg")
        print(f"Plot: {(arguments.out / 'thc-ablation.svg').resolve()}")


if __name__ == "__main__":
    main()
