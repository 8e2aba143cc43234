"""Step time over rates, and over how much is kept: HiPress's figure 12 on this machine's lab.

    python -m benchmarks.papers.hipress.sweeps                          # 20 minutes: benchmarks/results/sweeps.csv
    python -m benchmarks.papers.hipress.sweeps --out sweeps-report      # and the plot
    python -m benchmarks.papers.hipress.sweeps --plot-only --out sweeps-report

Four ranks replay the recorded backward of the main workload, at five rates, with DDP in fp32 and with its fp16 hook,
onebit, topk at three ratios and minmax at three widths. That is `gradwire bench training --replay` with these methods
and rates; what this adds is the plot.

Source: HiPress (SOSP 2021), figure 12. Differences: five rates in place of two networks; topk in place of DGC, whose
sampled threshold makes bytes vary; minmax is what the paper calls TernGrad.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from gradwire.bench import methods
from gradwire.bench.records import write_csv
from gradwire.bench.training import TrainingOptions
from gradwire.lab.units import parse_rate

RATES = ("10mbit", "30mbit", "100mbit", "300mbit", "1gbit")
RATIOS = tuple(f"topk:ratio={ratio}" for ratio in (0.001, 0.01, 0.05))
WIDTHS = tuple(f"minmax:bits={bits}" for bits in (2, 4, 8))
METHODS = (methods.DDP_FP32, methods.DDP_FP16, "onebit", *RATIOS, *WIDTHS)
COLOURS = dict(zip(METHODS, ("#3e4c59", "#9aa5b1", "#17a08a", "#c8ddf2", "#7fb0dd", "#2f6db5", "#f6d8b5", "#eaa85c",
                             "#b3590f")))  # fmt: skip
RESULTS = Path("benchmarks/results/sweeps.csv")

Steps = dict[tuple[str, str], dict[str, float]]
"""By method and rate: metrics by name."""


def read(path: Path) -> Steps:
    """The figures of a file, by method and rate."""
    found: Steps = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["method"], row["rate"]), {})[row["metric"]] = float(row["value"])
    return found


def kept(steps: Steps, methods_: Sequence[str], rate: str) -> list[tuple[str, float, float]]:
    """Of each method: its option, speed-up over DDP fp32, and how much of the first one's speed-up is lost."""
    speedups = [steps[method, rate]["speedup"] for method in methods_]
    names = [method.partition("=")[2] for method in methods_]
    return [(name, speedup, 1 - speedup / speedups[0]) for name, speedup in zip(names, speedups)]


def plot(steps: Steps, path: Path) -> None:
    """Step time against rate, and speed-up by ratio and width at each rate."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    rates = sorted({rate for _, rate in steps}, key=lambda rate: parse_rate(rate) or 0)
    known = [method for method in METHODS if (method, rates[0]) in steps]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    for method in known:
        times = [1e3 * steps[method, rate]["step"] for rate in rates]
        left.plot(range(len(rates)), times, color=COLOURS[method], marker="o", label=methods.label(method))
    ideal = [1e3 * steps[known[0], rate]["step_without_communication"] for rate in rates]
    left.plot(range(len(rates)), ideal, color="#1f2933", linestyle=":", label="without communication")
    left.set(yscale="log", ylabel="ms a step (logarithmic)", xlabel="rate of each link", title="Bandwidth")
    bars = [method for method in known if method in (*RATIOS, *WIDTHS)]
    width = 0.8 / max(1, len(bars))
    for index, method in enumerate(bars):
        places = [place + (index - (len(bars) - 1) / 2) * width for place in range(len(rates))]
        heights = [steps[method, rate]["speedup"] for rate in rates]
        right.bar(places, heights, width, color=COLOURS[method], label=methods.label(method))
    right.axhline(1.0, color="#3e4c59", linewidth=1)
    right.set(yscale="log", ylabel="times DDP fp32 (logarithmic)", xlabel="rate of each link", title="Kept fraction")
    for axes in (left, right):
        axes.set_xticks(range(len(rates)), rates)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
        axes.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def text(steps: Steps) -> str:
    """Figure 12b's question as lines: what keeping more costs."""
    lines = []
    for rate in sorted({rate for _, rate in steps}, key=lambda rate: parse_rate(rate) or 0):
        for group in (RATIOS, WIDTHS):
            if all((method, rate) in steps for method in group):
                first, *others = kept(steps, group, rate)
                parts = [f"{name}: {speedup:.2f}x ({-lost:+.1%})" for name, speedup, lost in others]
                parts.insert(0, f"{first[0]}: {first[1]:.2f}x")
                lines.append(f"{rate:8} {group[0].partition('=')[0]:11} {', '.join(parts)}")
    return "\n".join(lines)


def options(arguments: argparse.Namespace) -> TrainingOptions:
    """What to run."""
    return TrainingOptions(
        methods=METHODS,
        rates=tuple(arguments.rates),
        steps=0,
        timed_seconds=arguments.seconds,
        buckets_mb=(4.0, 25.0),
        deadline_seconds=3600.0,
        replay=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="*", default=list(RATES))
    parser.add_argument("--seconds", type=float, default=5.0, help="for which each method is timed at each rate")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, help="folder for the plot")
    parser.add_argument("--plot-only", action="store_true", help="run nothing, and read the figures from --csv")
    arguments = parser.parse_args(argv)
    if arguments.out:
        from gradwire.bench.extras import need

        need("matplotlib", extra="report", purpose="the plot")
    if not arguments.plot_only:
        from gradwire.cli.bench import run_with_bars, show

        result = run_with_bars(options(arguments))
        show(result)
        write_csv(result, arguments.csv)
        print(f"Figures: {arguments.csv.resolve()}")
    steps = read(arguments.csv)
    print(text(steps))
    if arguments.out:
        plot(steps, arguments.out / "sweeps.svg")
        print(f"Plot: {(arguments.out / 'sweeps.svg').resolve()}")


if __name__ == "__main__":
    main()
