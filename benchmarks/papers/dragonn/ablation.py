"""What each of DRAGONN's means gains, switched on one after the other: its figure 6 in this machine's lab.

    python -m benchmarks.papers.dragonn.ablation  # 3 minutes: results/sparse-ablation-text.csv
    python -m benchmarks.papers.dragonn.ablation --workload deep
    python -m benchmarks.papers.dragonn.ablation --workload CLASS=FOLDER
    python -m benchmarks.papers.dragonn.ablation --plot-only --out sparse-report # the plot of all the figures there are

Four ranks replay the recorded backward of a workload, at a ratio of 0.001 by all-gather:

    dense            DDP's own all-reduce in fp32, with the better of two bucket sizes
    dgc              every tensor by DGC, payloads decoded one by one
    hashing          every tensor by DRAGONN, likewise
    selection        the tensors for which the planner expects a gain, likewise; or DDP's all-reduce
    sparse decoding  the same with the payloads of all ranks decoded in one sweep

Synchronisation is the step less the step without communication.

Source: DRAGONN (Wang et al. 2022), section 5.2, figure 6. Differences: DGC is our own, on CPUs, where choosing elements
needs no prefix sums, so that hashing has less to gain; 4 ranks.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.papers.dragonn.ratios import short
from benchmarks.papers.dragonn.stages import PLANNED, STAGES, register_all
from benchmarks.papers.hipress import breakdown
from gradwire.bench.job import Job
from gradwire.bench.launch import launch
from gradwire.bench.records import write_figures

RATES = ("100mbit", "1gbit")
RESULTS = Path("benchmarks/results")
COLOURS = dict(zip((breakdown.DENSE, *STAGES), ("#3e4c59", "#b3590f", "#eaa85c", "#7fb0dd", "#17a08a")))

Times = dict[tuple[str, str, str], float]
"""Seconds of synchronisation by workload, rate and stage."""


def read(paths: Iterable[Path]) -> Times:
    """The figures of files."""
    found = {}
    for path in paths:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["metric"] == "synchronisation":
                    found[row["workload"], row["rate"], row["method"]] = float(row["value"])
    return found


def table(times: Times) -> str:
    """Milliseconds of synchronisation in Markdown."""
    stages = list(COLOURS)
    lines = [f"| | {' | '.join(stages)} |", "|---|" + "---|" * len(stages)]
    for workload, rate in dict.fromkeys(key[:2] for key in times):
        cells = [f"{1e3 * times[workload, rate, stage]:,.1f}" for stage in stages]
        lines.append(f"| {workload}, {rate} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(times: Times, path: Path) -> None:
    """Bars of the stages, a group a workload and rate."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    groups = list(dict.fromkeys(key[:2] for key in times))
    figure, axes = pyplot.subplots(figsize=(2.2 * len(groups) + 2, 4.4), layout="constrained")
    width = 0.8 / len(COLOURS)
    for index, (stage, colour) in enumerate(COLOURS.items()):
        places = [place + (index - (len(COLOURS) - 1) / 2) * width for place in range(len(groups))]
        axes.bar(
            places, [1e3 * times[workload, rate, stage] for workload, rate in groups], width, color=colour, label=stage
        )
    axes.set(yscale="log", ylabel="ms of synchronisation (logarithmic)")
    axes.set_xticks(range(len(groups)), [f"{workload}\n{rate}" for workload, rate in groups])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(frameon=False, ncols=len(COLOURS), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def measure(workload: str, rates: Sequence[str], seconds: float, target: Path) -> None:
    """Run all stages, and write what they took."""
    register_all()  # the plans that ranks send name them
    run, plans = breakdown.segments(rates, seconds, STAGES), breakdown.Plans()
    job = Job(workload, tuple(run), folder="", deadline_seconds=1800.0, replay=True)
    outcomes = launch(job, breakdown.RANKS, plans, lab=True, module="benchmarks.papers.dragonn.stages")
    found = breakdown.stages(run, outcomes, rates)
    print(f"{short(workload)}, {breakdown.RANKS} ranks\n{breakdown.text(found)}")
    for rate, plan in plans.found.items():
        print(f"{rate}: {plan.verdict()}")
    assert all(outcome.identical is not False for outcome in outcomes), "ranks differ"
    figures = breakdown.figures(short(workload), found, plans.found, PLANNED)
    write_figures("sparse-ablation", figures, target, more_columns=("workload",))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="text")
    parser.add_argument("--rates", nargs="*", default=list(RATES))
    parser.add_argument("--seconds", type=float, default=4.0, help="for which each stage is timed at each rate")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the figures, one file a workload")
    parser.add_argument("--out", type=Path, help="folder for the plot")
    parser.add_argument("--plot-only", action="store_true", help="run nothing, and read the figures that there are")
    arguments = parser.parse_args(argv)
    if not arguments.plot_only:
        target = arguments.results / f"sparse-ablation-{short(arguments.workload)}.csv"
        measure(arguments.workload, arguments.rates, arguments.seconds, target)
    times = read(sorted(arguments.results.glob("sparse-ablation-*.csv")))
    print(table(times))
    if arguments.out:
        plot(times, arguments.out / "sparse-ablation.svg")
        print(f"Plot: {(arguments.out / 'sparse-ablation.svg').resolve()}")


if __name__ == "__main__":
    main()
