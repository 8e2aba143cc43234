"""Gain of each part of DRAGONN, added one after another: its figure 6 in this machine's lab.

Four ranks replay the recorded backward pass of a workload, with a ratio of 0.001 and all-gather:

    dense            DDP's own all-reduce in fp32, with the better of two bucket sizes
    dgc              every tensor with DGC, payloads decoded one by one
    hashing          every tensor with DRAGONN, decoded in the same way
    selection        only tensors for which the planner expects a gain; or DDP's all-reduce
    sparse decoding  the same, with the payloads of all ranks decoded in one sweep

Synchronization time is the step time minus the step without communication.

Source: DRAGONN (Wang et al. 2022), section 5.2, figure 6. Differences: DGC is our own, on CPUs, where selection needs
no prefix sums, so that hashing has less to gain; 4 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.options import Rates, Seconds, listed
from benchmarks.papers.dragonn.stages import PLANNED, STAGES, register_all
from benchmarks.papers.hipress import breakdown
from benchmarks.plotting import DENSE, bar_places, figure, plain_numbers

RATES = ("100mbit", "1gbit")
Row = dict[str, Any]
COLORS = dict(zip((breakdown.DENSE, *STAGES), (DENSE, "#b3590f", "#eaa85c", "#7fb0dd", "#17a08a")))

Times = dict[tuple[str, str, str], float]
"""Seconds of synchronization by workload, rate and stage."""


def times_of(rows: Sequence[Row]) -> Times:
    """Seconds of synchronization."""
    return {
        (row["workload"], row["rate"], row["method"]): row["value"]
        for row in rows
        if row["metric"] == "synchronization"
    }


def table(rows: Sequence[Row]) -> str:
    """Milliseconds of synchronization in Markdown."""
    times = times_of(rows)
    stages = list(COLORS)
    lines = [f"| | {' | '.join(stages)} |", "|---|" + "---|" * len(stages)]
    for workload, rate in dict.fromkeys(key[:2] for key in times):
        cells = [f"{1e3 * times[workload, rate, stage]:,.1f}" for stage in stages]
        lines.append(f"| {workload}, {rate} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Bars of the stages, grouped by workload and rate."""
    times = times_of(rows)
    groups = list(dict.fromkeys(key[:2] for key in times))
    with figure(folder / "sparse-ablation.svg", size=(2.2 * len(groups) + 2, 4.4)) as axes:
        axis = axes[0][0]
        for index, (stage, color) in enumerate(COLORS.items()):
            heights = [1e3 * times[workload, rate, stage] for workload, rate in groups]
            places = bar_places(index, len(COLORS), len(groups))
            axis.bar(places, heights, 0.8 / len(COLORS), color=color, label=stage)
        axis.set(yscale="log", ylabel="ms of synchronization (logarithmic)")
        axis.set_xticks(range(len(groups)), [f"{workload}\n{rate}" for workload, rate in groups])
        plain_numbers(axis.yaxis)
        axis.legend(ncols=len(COLORS), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.1))


def run(
    workload: Annotated[str, typer.Option(help="text, deep, or a class.")] = "text",
    data: Annotated[Path | None, typer.Option(help="Folder of the data of a class.")] = None,
    rates: Rates = "",
    seconds: Seconds = 4.0,
) -> Iterator[Row]:
    """Run all stages."""
    register_all()  # the plans that ranks send name them
    full = workload if data is None else f"{workload}={data.resolve()}"
    ranks = "benchmarks.papers.dragonn.stages"
    for row in breakdown.measure(full, listed(rates, RATES), seconds, STAGES, PLANNED, ranks):
        yield {**row, "workload": short(workload)}


def short(workload: str) -> str:
    """Name of a workload in tables. For a class, the name of its module."""
    name = workload.partition("=")[0]
    return name.split(".")[-2 if "." in name else -1].replace("_", "-")
