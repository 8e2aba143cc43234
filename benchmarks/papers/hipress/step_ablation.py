"""Gain of batch compression, tensor fusion and computation threads: steps with one part left out or added.

Four ranks replay the recorded backward pass of three workloads: hundreds of tiny tensors (blocks), hundreds of small
ones (deep) and a few large ones (text). All variants compress with onebit and co-located servers:

    dense                      DDP's own all-reduce in fp32, with the better of two bucket sizes
    all                        batch compression and fusion, with one computation thread, as by default on two cores
    without-batch-compression  tensors of a group share messages, but are encoded, merged and decoded one by one
    without-fusion             each tensor is a submission of its own, with tasks and messages of its own
    two-threads                all, with two computation threads
    all-again                  all once more, which shows how far a variant differs from itself

The library has no switch for batch compression and fusion; the ranks of the benchmark leave them out. Without batch
compression, the compressor is a subclass that has no compiled functions. Without fusion, a compiled call handles one
tensor, and more submissions add a little to the cost. With one computation thread, kernels divide large tensors among
the rank's cores. With two, each kernel keeps to its thread.

Source: HiPress (SOSP 2021), sections 3.2 and 3.4, whose figure 11 adds batch compression and bulk communication in one
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from benchmarks.options import Rates, Seconds, choose, listed
from benchmarks.papers.hipress import breakdown
from benchmarks.papers.hipress.stages import CODEC, How, runner
from gradwire.bench import worker
from gradwire.bench.results import StepTime
from gradwire.compressors import Compressor, make, register
from gradwire.compressors.base import Compiled
from gradwire.sync.plan import Plan

WORKLOADS, RATES = ("blocks", "deep", "text"), ("none", "1gbit", "100mbit")
ALL, WITHOUT_BATCHES, WITHOUT_FUSION = "all", "without-batch-compression", "without-fusion"
TWO_THREADS, AGAIN = "two-threads", "all-again"
VARIANTS = (ALL, WITHOUT_BATCHES, WITHOUT_FUSION, TWO_THREADS, AGAIN)
KEY, CHOICES = ("workload",), ("workloads",)
Row = dict[str, Any]


class OneByOne(Compressor):
    """Mixin without compiled functions, so that the tensors of a group are encoded one by one."""

    def compiled(self) -> Compiled | None:
        """See `Compressor`."""
        return None


def one_by_one() -> type[Compressor]:
    """The compressor ``onebit_one_by_one``."""
    base: Any = type(make(CODEC))
    found: type[Compressor] = type(f"{CODEC}_one_by_one", (OneByOne, base), {"name": f"{CODEC}_one_by_one"})
    return found


def how(variant: str) -> How:
    """How a variant synchronizes gradients."""
    codec = one_by_one()() if variant == WITHOUT_BATCHES else make(CODEC)
    return How(Plan(codec), buckets=variant != WITHOUT_FUSION, threads=2 if variant == TWO_THREADS else 1)


def figures(workload: str, times: dict[str, dict[str, StepTime]]) -> Iterator[Row]:
    """One row for each figure."""
    for rate, found in times.items():
        for method, time in found.items():
            where = {"workload": workload, "method": method, "rate": rate, "ranks": breakdown.RANKS,
                     "source": "measured", "dtype": "float32"}  # fmt: skip
            step = time.step
            spread = {"value": step.median, "p20": step.p20, "p80": step.p80, "samples": step.size}
            yield {**where, "metric": "step", "unit": "s", **spread}
            yield {**where, "metric": "step_without_communication", "unit": "s", "value": time.compute}
            yield {**where, "metric": "processor", "unit": "s", "value": time.processor}
            yield {**where, "metric": "bytes", "unit": "B", "value": time.bytes}
            yield {
                **where,
                "metric": "step_over_all",
                "unit": "fraction",
                "value": step.median / found[ALL].step.median,
            }


def run(
    workloads: Annotated[str, typer.Option(help="blocks, deep, text, or some of them.")] = "",
    rates: Rates = "",
    seconds: Seconds = 5.0,
) -> Iterator[Row]:
    """Run all variants on all workloads."""
    chosen_rates = listed(rates, RATES)
    for workload in choose(workloads, WORKLOADS):
        ordered = breakdown.segments(chosen_rates, seconds, VARIANTS)
        outcomes = breakdown.run_segments(workload, ordered, "benchmarks.papers.hipress.step_ablation")
        yield from figures(workload, breakdown.step_times(ordered, outcomes, chosen_rates))


def table(rows: Sequence[Row]) -> str:
    """Markdown table with one line for each variant, workload and rate."""
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["workload"], row["rate"], row["method"]), {})[row["metric"]] = row
    lines = ["| | step ms | p20 to p80 | ÷ all | processor ms | MB |", "|---|---|---|---|---|---|"]
    for (workload, rate, method), of in found.items():
        step = of["step"]
        lines.append(
            f"| {workload}, {rate}, {method} | {1e3 * step['value']:.1f} | {1e3 * step['p20']:.1f} to "
            f"{1e3 * step['p80']:.1f} | {of['step_over_all']['value']:.2f} | {1e3 * of['processor']['value']:.1f} | "
            f"{of['bytes']['value'] / 1e6:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    register(one_by_one())
    worker.main(partial(runner, how_of=how))
