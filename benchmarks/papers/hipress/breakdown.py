"""Gain of each part of HiPress, added one after another: its figure 11 as a table, in this machine's lab.

Four ranks replay the recorded backward pass of a workload with a few large tensors (text) and of one with hundreds of
small tensors (deep), with onebit and co-located servers:

    dense      DDP's own all-reduce in fp32, with the better of two bucket sizes
    torch      every tensor compressed with plain torch operations, one tensor after another
    generated  the same with the code that gradwire generates
    pipelined  all tensors at once: one is encoded while another is sent
    bulk       the tensors of a bucket at once: vectors and tensors below 1,024 elements in one dense message,
               other tensors up to 131,072 elements in one message of payloads, which one call encodes
    planned    the planner decides for each tensor whether to compress, strategy and partitions, or uses DDP's ring

Synchronization time is the step time minus the step without communication. In all stages, the backward pass continues
while gradients are sent, as in HiPress's baselines.

Source: HiPress (SOSP 2021), figure 11. Differences: all codecs run on CPUs, so that its on-CPU stage is one of torch
operations here; the smallest tensors stay dense from bulk on, so that part of what the paper attributes to selective
compression appears there; there is no bulk coordinator (`coordinator.py` explains why); only the planner uses a ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from benchmarks.options import Rates, Seconds, choose, listed
from gradwire.bench.job import BenchmarkJob, Message, Progress, Segment, SegmentOutcome
from gradwire.bench.launch import launch
from gradwire.bench.methods import DDP_FP32, SILENT
from gradwire.bench.results import StepTime, combine_times
from gradwire.bench.statistics import Spread
from gradwire.planner import PlanTable

WORKLOADS, RATES = ("text", "deep"), ("100mbit", "1gbit")
STAGES = ("torch", "generated", "pipelined", "bulk", "planned")
DENSE = "dense"
RANKS, BUCKET_MB, OTHER_BUCKET_MB = 4, 4.0, 25.0
KEY, CHOICES = ("workload",), ("workloads",)
Row = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One stage at one rate.

    Attributes:
        name: Name of the stage.
        time: Step time.
        before: Synchronization time of the previous stage; None for the first.
    """

    name: str
    time: StepTime
    before: float | None

    @property
    def synchronization(self) -> float:
        """Seconds of the step in excess of computation."""
        return max(0.0, self.time.step.median - self.time.compute)

    @property
    def saved(self) -> float | None:
        """Fraction of the previous stage's synchronization time that this stage saves."""
        return 1 - self.synchronization / self.before if self.before else None


@dataclass
class Plans:
    """Collects the planner's decisions at each rate, which are sent as the phase of a progress message."""

    found: dict[str | None, PlanTable] = field(default_factory=dict)

    def __call__(self, message: Message) -> None:
        if isinstance(message, Progress) and message.phase.startswith("{"):
            self.found[message.rate] = PlanTable.from_json(message.phase)


def segments(rates: Sequence[str], seconds: float, stages: Sequence[str] = STAGES) -> list[Segment]:
    """Segments to run: each stage at all rates, and the step without communication before and after."""
    silent = Segment(SILENT, BUCKET_MB, min_timed=15, max_timed=15)
    timed = {"timed_seconds": seconds, "min_timed": 5, "rates": tuple(rates)}
    dense = [Segment(DDP_FP32, size, **timed) for size in (BUCKET_MB, OTHER_BUCKET_MB)]
    return [silent, *dense, *(Segment(stage, BUCKET_MB, **timed) for stage in stages), silent]


def step_times(
    run: Sequence[Segment], outcomes: Sequence[SegmentOutcome], rates: Sequence[str]
) -> dict[str, dict[str, StepTime]]:
    """Step times at each rate by name of the stage, computed from the outcomes of the ranks."""
    of = [sorted((o for o in outcomes if o.segment == index), key=lambda o: o.rank) for index in range(len(run))]
    silent = [outcomes for segment, outcomes in zip(run, of) if segment.method == SILENT]
    compute = Spread.of([s for ranks in silent for o in ranks for timed in o.timed for s in timed.seconds]).median
    table = {}
    for number, rate in enumerate(rates):
        times: dict[str, StepTime] = {}
        for segment, ranks in zip(run, of):
            if segment.method != SILENT:
                name = DENSE if segment.method == DDP_FP32 else segment.method
                time = combine_times([outcome.timed[number] for outcome in ranks], compute, True)
                if name not in times or time.step.median < times[name].step.median:
                    times[name] = time
        table[rate] = times
    return table


def stages(run: Sequence[Segment], outcomes: Sequence[SegmentOutcome], rates: Sequence[str]) -> dict[str, list[Stage]]:
    """Stages at each rate."""
    return {rate: chain(times) for rate, times in step_times(run, outcomes, rates).items()}


def chain(times: dict[str, StepTime]) -> list[Stage]:
    """Link each stage to the previous one."""
    found: list[Stage] = []
    for name, time in times.items():
        found.append(Stage(name, time, found[-1].synchronization if found else None))
    return found


def figures(
    workload: str,
    table: dict[str, list[Stage]],
    plans: dict[str | None, PlanTable],
    planned: Sequence[str] = ("planned",),
) -> Iterator[dict[str, Any]]:
    """One line for each figure. `workload` is a column of its own."""
    for rate, found in table.items():
        for stage in found:
            here = {"workload": workload, "method": stage.name, "rate": rate, "ranks": RANKS, "source": "measured",
                    "dtype": "float32"}  # fmt: skip
            step = stage.time.step
            spread = {"value": step.median, "p20": step.p20, "p80": step.p80, "samples": step.size}
            yield {**here, "metric": "step", "unit": "s", **spread}
            yield {**here, "metric": "step_without_communication", "unit": "s", "value": stage.time.compute}
            yield {**here, "metric": "synchronization", "unit": "s", "value": stage.synchronization}
            yield {**here, "metric": "bytes", "unit": "B", "value": stage.time.bytes}
            if stage.saved is not None:
                yield {**here, "metric": "saved_of_stage_before", "unit": "fraction", "value": stage.saved}
            if stage.name in planned and rate in plans:
                plan = plans[rate]
                compressed = sum(row.spec != "none" for row in plan.rows)
                yield {**here, "metric": "compressed_tensors", "unit": f"of {len(plan.rows)}", "value": compressed}
                yield {**here, "metric": "partitions", "unit": "most", "value": max(r.partitions for r in plan.rows)}
                yield {**here, "metric": "step", "unit": "s", "value": plan.step, "source": "predicted"}


def run_segments(
    workload: str, ordered: Sequence[Segment], module: str, plans: Plans | None = None
) -> list[SegmentOutcome]:
    """Run segments on one workload in the lab; `module` is what the ranks run."""
    job = BenchmarkJob(workload, tuple(ordered), folder="", deadline_seconds=1800.0, replay=True)
    outcomes = launch(job, RANKS, plans or Plans(), lab=True, module=module)
    odd = sorted({ordered[outcome.segment].method for outcome in outcomes if outcome.identical is False})
    if odd:
        raise AssertionError(f"Ranks ended with different bits: {', '.join(odd)}.")
    return outcomes


def measure(
    workload: str, rates: Sequence[str], seconds: float, names: Sequence[str], planned: Sequence[str], module: str
) -> Iterator[Row]:
    """Run stages on one workload; `module` is what the ranks run."""
    ordered, plans = segments(rates, seconds, names), Plans()
    outcomes = run_segments(workload, ordered, module, plans)
    for rate, plan in plans.found.items():
        print(f"{rate}: {plan.verdict()}")
    yield from figures(workload, stages(ordered, outcomes, rates), plans.found, planned)


def run(
    workloads: Annotated[str, typer.Option(help="text, deep, or both.")] = "",
    rates: Rates = "",
    seconds: Seconds = 8.0,
) -> Iterator[Row]:
    """Run all workloads."""
    for workload in choose(workloads, WORKLOADS):
        yield from measure(
            workload, listed(rates, RATES), seconds, STAGES, ("planned",), "benchmarks.papers.hipress.stages"
        )


def table(rows: Sequence[Row]) -> str:
    """The figure as a table, with one line for each stage."""
    steps: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        if row["source"] == "measured":
            steps.setdefault((row["workload"], row["rate"], row["method"]), {})[row["metric"]] = row
    lines = [f"{'':26}{'':10}{'':17}{'step ms':>9}{'p20-p80':>16}{'sync ms':>9}{'saved':>8}{'MB':>8}"]
    for (workload, rate, name), found in steps.items():
        step, saved = found["step"], found.get("saved_of_stage_before")
        percent = f"{saved['value']:+.0%}" if saved else ""
        spread = f"{1e3 * step['p20']:.1f}-{1e3 * step['p80']:.1f}"
        lines.append(
            f"{workload:26}{rate:10}{name:17}{1e3 * step['value']:9.1f}{spread:>16}"
            f"{1e3 * found['synchronization']['value']:9.1f}{percent:>8}"
            f"{found['bytes']['value'] / 1e6:8.2f}"
        )
    return "\n".join(lines)
