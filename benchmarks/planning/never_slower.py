"""Is a method of gradwire ever slower than its rivals? Steps in turns, compared run by run.

All methods of a run exist in one job in the lab. Each replays the backward pass of the same recording; codecs and
network are real. Steps of the same method differ from job to job by more than within one, so each of the six runs has a
job of its own. `auto` begins every run from nothing. Once it has decided, the methods are timed in turns of about a
second (`benchmarks/planning/turns.py`), since the speed of a machine drifts by more than a method may lose. The first
module that a process makes was seen to be slower by a millisecond in 45, with the same method: its tensors lie
elsewhere in memory. So in each run another method is made first. Bucket sizes are tried in a job of their own, and each
method keeps its faster one. `auto` has that of the fastest rival, as in a script that was tuned without it.

A run has the mean of its steps, which is what training takes: `auto` does more in some, and a median would not see
those. The best rival is the one with the smallest median of its runs. A ratio is its step over the method's in the
same run, and a cell has the median of its ratios. Its control is a rival compared with itself: each run has a second
copy of the one that was the fastest in trial, and the control is the range of their ratios. A cell holds if its median
is at least 0.99, or is no less than the lower end of the control.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.accuracy.time_to_accuracy import WORKLOADS, Task
from benchmarks.intervals import interval
from benchmarks.keys import key_of
from benchmarks.options import Rates, Seconds, listed
from gradwire.bench.job import BenchmarkJob, Message, Segment, SegmentOutcome
from gradwire.bench.launch import launch
from gradwire.bench.methods import bucket_sizes, is_auto, is_native, label
from gradwire.bench.results import combine_times
from gradwire.bench.statistics import across_ranks
from gradwire.bench.table import rate_text
from gradwire.planner import PlanTable

RANKS = 4
BUCKETS_MB = (4.0, 1.0, 25.0)
AGAIN = " again"
"""Ends the name of the rival's second copy."""
UNSHAPED = "none"
BOUND = 0.99
MADE_BY = {"vision": WORKLOADS["vision"]}
"""The others have the names of `gradwire bench`: `text` has its batches of 304 samples on each rank."""
KEY, CHOICES = ("workload", "rate"), ("workloads", "rates")
Row = dict[str, Any]


# -- runs ----------------------------------------------------------------------------------------------------------


def cell(task: Task, rate: str, methods: Sequence[str], runs: int, seconds: float, progress: Progress) -> list[Row]:
    """Rows of all runs of one workload at one rate. The first method is compared with the others."""
    method, *rivals = methods
    tuned = rivals if is_auto(method) else methods
    sizes = {each: BUCKETS_MB if each == method else bucket_sizes(each, BUCKETS_MB) for each in tuned}
    tried = [(each, size) for each in tuned for size in sizes[each]]
    faster: dict[str, Row] = {}
    mean = itemgetter("mean")
    for row in _run(task, rate, tried, seconds / 3, progress, "gradwire.bench.worker"):
        faster[row["method"]] = min(faster.get(row["method"], row), row, key=mean)
    faster.setdefault(method, min(faster.values(), key=mean))
    twin = min(rivals, key=lambda each: mean(faster[each]))
    chosen = [(each, faster[each]["bucket_mb"], "") for each in methods] + [(twin, faster[twin]["bucket_mb"], AGAIN)]
    rows: list[Row] = []
    for run in range(runs):
        first = run % len(chosen)
        ordered = chosen[first:] + chosen[:first]
        part = _run(task, rate, [each[:2] for each in ordered], seconds, progress, "benchmarks.planning.turns")
        for row, (_, _, again) in zip(part, ordered, strict=True):
            rows.append(row | {"run": run, "method": row["method"] + again})
    return rows


def _run(
    task: Task, rate: str, methods: Sequence[tuple[str, float]], seconds: float, progress: Progress, module: str
) -> list[Row]:
    """Run methods with their bucket sizes in one job of this module."""
    rates = (None if rate == UNSHAPED else rate,)
    segments = [
        Segment(method, size, timed_seconds=seconds, min_timed=2, max_timed=200, rates=rates)
        for method, size in methods
    ]
    bar = progress.add_task(f"{task.name}, {rate_text(rates[0])}", total=len(segments))

    def on_message(message: Message) -> None:
        if isinstance(message, SegmentOutcome) and message.rank == 0:
            progress.advance(bar)

    deadline = 300.0 * len(segments)
    job = BenchmarkJob(task.made_by, tuple(segments), folder="", deadline_seconds=deadline, replay=True)
    outcomes = launch(job, RANKS, on_message, lab=True, module=module)
    progress.remove_task(bar)
    rows = []
    for index, (method, size) in enumerate(methods):
        timed = [outcome.timed[0] for outcome in outcomes if outcome.segment == index]
        time = combine_times(timed, 0.0, measured=True, bucket_mb=size)
        rows.append(
            {
                "workload": task.name, "rate": rate, "method": method, "bucket_mb": size,
                "ranks": RANKS, "size": task.num_parameters, "metric": "step", "unit": "s", "source": "measured",
                "value": time.step.median, "p20": time.step.p20, "p80": time.step.p80, "samples": time.step.size,
                "mean": statistics.fmean(across_ranks([each.seconds for each in timed])),
                "bytes": time.bytes, "plan": summary_of(time.settled), "settling": time.settling,
            }
        )  # fmt: skip
    return rows


def summary_of(settled: str | None) -> str:
    """What `auto` has settled on: one of DDP's own methods, or the compressors of its plan."""
    if settled is None or is_native(settled):
        return settled or ""
    return ", ".join(sorted({row.spec for row in PlanTable.from_json(settled).rows}))


def run(
    data: Annotated[Path | None, typer.Option(help="Folder or tar of CIFAR-10 as images, for vision.")] = None,
    method: Annotated[str, typer.Option(help="Method to judge.")] = "auto",
    rivals: Annotated[str, typer.Option(help="What it is compared with.")] = "ddp-fp32,ddp-fp16",
    workloads: Annotated[str, typer.Option(help="text, deep, blocks, vision.")] = "text,deep,blocks,vision",
    rates: Rates = "none,1gbit,100mbit,10mbit",
    runs: Annotated[int, typer.Option(help="Runs of each method, in jobs of their own.", min=1)] = 6,
    seconds: Seconds = 6.0,
    *,
    done: Set[tuple[str, ...]],
) -> Iterator[list[Row]]:
    """Run the cells that the record does not have."""
    tasks = [Task.of(name, data, MADE_BY) for name in listed(workloads, ())]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for rate in listed(rates, ()):
            for task in tasks:
                if key_of({"workload": task.name, "rate": rate}, KEY) not in done:
                    part = cell(task, rate, [method, *listed(rivals, ())], runs, seconds, progress)
                    progress.console.print(_line(Verdict.of(part)))
                    yield part


# -- the verdict ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One cell.

    Attributes:
        workload: Name of the workload.
        rate: Rate of the links.
        method: The method.
        rival: Its best rival.
        step: Median step of the method in seconds.
        rival_step: The rival's.
        ratio: Median of the ratios.
        mean: Mean of the ratios, and half of its 95 % interval.
        worst: The smallest ratio of one run.
        control: The least and the largest ratio of a rival to itself.
    """

    workload: str
    rate: str
    method: str
    rival: str
    step: float
    rival_step: float
    ratio: float
    mean: tuple[float, float]
    worst: float
    control: tuple[float, float]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Verdict:
        """Judge the runs of one cell. The method is that of the first row."""
        steps: dict[str, dict[int, float]] = {}
        for row in rows:
            steps.setdefault(row["method"], {})[row["run"]] = row["mean"]
        method, *others = steps
        rivals = [name for name in others if not name.endswith(AGAIN)]
        medians = {name: statistics.median(each.values()) for name, each in steps.items()}
        rival = min(rivals, key=medians.__getitem__)
        ratios = [steps[rival][run] / step for run, step in steps[method].items()]
        (twin,) = set(others) - set(rivals)
        itself = [steps[twin.removesuffix(AGAIN)][run] / step for run, step in steps[twin].items()]
        return cls(
            rows[0]["workload"], rows[0]["rate"], method, rival, medians[method], medians[rival],
            statistics.median(ratios), interval(ratios), min(ratios), (min(itself), max(itself)),
        )  # fmt: skip

    @property
    def holds(self) -> bool:
        """Whether the method is not slower than its rival."""
        return self.ratio >= min(BOUND, self.control[0])


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """All cells of a record."""
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault(key_of(row, KEY), []).append(row)
    return [Verdict.of(each) for each in cells.values()]


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of the cells, and how many hold."""
    found = verdicts(rows)
    lines = [
        "| | | rival | its step, ms | step, ms | ratio | mean | worst run | rival against itself | |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(_line, found),
    ]
    holding = sum(each.holds for each in found)
    name = f"`{found[0].method}` is not slower" if found else "Nothing was measured"
    return "\n".join([*lines, "", f"{name} in {holding} of {len(found)} cells."])


def _line(found: Verdict) -> str:
    rate = rate_text(None if found.rate == UNSHAPED else found.rate)
    (low, high), (mean, half) = found.control, found.mean
    return (
        f"| {found.workload} | {rate} | {label(found.rival)} | {1e3 * found.rival_step:.1f} | {1e3 * found.step:.1f} "
        f"| {found.ratio:.2f} | {mean:.3f} ± {half:.3f} | {found.worst:.2f} | {low:.2f} to {high:.2f} "
        f"| {'' if found.holds else 'slower'} |"
    )
