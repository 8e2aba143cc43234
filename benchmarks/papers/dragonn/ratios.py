"""Speed-up over the compression ratio, with QSGD beside sparsifiers: DRAGONN's figure 8 in this machine's lab.

    python -m benchmarks.papers.dragonn.ratios  # 3 minutes: results/sparse-ratios-text.csv
    python -m benchmarks.papers.dragonn.ratios --out sparse-report               # and the plot
    python -m benchmarks.papers.dragonn.ratios --plot-only --out sparse-report
    python -m benchmarks.papers.dragonn.ratios --workload benchmarks.papers.dragonn.vision.Cifar10=FOLDER

Four ranks replay the recorded backward of a workload with dragonn and dgc at four ratios and qsgd at three widths, at
two rates. The ratio of the plot is that of bytes, positions and headers included.

Source: DRAGONN (Wang et al. 2022), section 5.3, figure 8. Differences: the main workload, wide residual layers, in
place of ViT and MLP-Mixer; 4 ranks on slower links.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradwire.bench import methods
from gradwire.bench.records import write_csv
from gradwire.bench.training import TrainingOptions

RATES = ("100mbit", "1gbit")
RATIOS = (0.0001, 0.001, 0.01, 0.1)
FAMILIES = {
    "dragonn": tuple(f"dragonn:ratio={ratio}" for ratio in RATIOS),
    "dgc": tuple(f"dgc:ratio={ratio}" for ratio in RATIOS),
    "qsgd": tuple(f"qsgd:bits={bits}" for bits in (2, 4, 8)),
}
METHODS = (methods.DDP_FP32, *(method for family in FAMILIES.values() for method in family))
COLOURS = dict(zip(FAMILIES, ("#17a08a", "#b3590f", "#2f6db5")))


@dataclass(frozen=True)
class Point:
    """One method at one rate.

    Attributes:
        fraction: of the dense bytes.
        speedup: over DDP fp32.
        over_ideal: step over ideal step.
    """

    fraction: float
    speedup: float
    over_ideal: float


Points = dict[tuple[str, str], Point]
"""By method and rate."""


def results(workload: str) -> Path:
    """The file of a workload's figures."""
    return Path(f"benchmarks/results/sparse-ratios-{short(workload)}.csv")


def short(workload: str) -> str:
    """Its name in files: of a class, the module's last word."""
    return workload.partition("=")[0].split(".")[-2 if "=" in workload else -1].replace("_", "-")


def read(path: Path) -> Points:
    """The figures of a file."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["method"], row["rate"]), {})[row["metric"]] = float(row["value"])
    return {
        key: Point(1 / metrics["compression_ratio"], metrics["speedup"], metrics["step_over_ideal"])
        for key, metrics in found.items()
        if "compression_ratio" in metrics
    }


def table(points: Points) -> str:
    """Speed-ups in Markdown: a line a method."""
    rates = list(dict.fromkeys(rate for _, rate in points))
    lines = [f"| | of the dense bytes | {' | '.join(f'{rate}: ×, ÷ ideal' for rate in rates)} |"]
    lines.append("|---|---|" + "---|" * len(rates))
    for method in dict.fromkeys(method for method, _ in points):
        cells = [f"{points[method, rate].speedup:.2f}, {points[method, rate].over_ideal:.2f}" for rate in rates]
        lines.append(f"| `{method}` | {points[method, rates[0]].fraction:.3%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(points: Points, path: Path) -> None:
    """Speed-up against the fraction of bytes, a picture a rate."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    rates = list(dict.fromkeys(rate for _, rate in points))
    figure, panels = pyplot.subplots(
        1, len(rates), figsize=(5.5 * len(rates), 4.2), layout="constrained", squeeze=False
    )
    for axes, rate in zip(panels[0], rates):
        for family, members in FAMILIES.items():
            mine = sorted((points[m, rate].fraction, points[m, rate].speedup) for m in members if (m, rate) in points)
            if mine:
                axes.plot(*zip(*mine), marker="o", color=COLOURS[family], label=family)
        axes.axhline(1.0, color="#3e4c59", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel="bytes, as a fraction of dense ones", title=rate)
        axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        axes.set_yticks([], minor=True)
    panels[0][0].set_ylabel("times DDP fp32 (logarithmic)")
    panels[0][0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="text")
    parser.add_argument("--rates", nargs="*", default=list(RATES))
    parser.add_argument("--seconds", type=float, default=3.0, help="for which each method is timed at each rate")
    parser.add_argument("--csv", type=Path, help="default: one a workload, in benchmarks/results")
    parser.add_argument("--out", type=Path, help="folder for the plot")
    parser.add_argument("--plot-only", action="store_true", help="run nothing, and read the figures from --csv")
    arguments = parser.parse_args(argv)
    target = arguments.csv or results(arguments.workload)
    if arguments.out:
        from gradwire.bench.extras import need

        need("matplotlib", extra="report", purpose="the plot")
    if not arguments.plot_only:
        from gradwire.cli.bench import run_with_bars

        options = TrainingOptions(
            workload=arguments.workload, methods=METHODS, rates=tuple(arguments.rates), steps=0,
            timed_seconds=arguments.seconds, buckets_mb=(4.0, 25.0), deadline_seconds=1800.0, replay=True,
        )  # fmt: skip
        write_csv(run_with_bars(options), target)
    points = read(target)
    print(table(points))
    if arguments.out:
        path = arguments.out / f"{target.stem}.svg"
        plot(points, path)
        print(f"Plot: {path.resolve()}")


if __name__ == "__main__":
    main()
