"""Trainings with `lossless` and `gcomp` in the lab: figures 11, 15, 16 and 20 of GCOMP's paper.

Two ranks, then four, train the text workload, a model with 6.3 million parameters, each on a host of its own:

    step       seconds per iteration at three rates, and sentences per second (figures 15 and 16)
    processor  seconds of processor time per rank and iteration, of all threads (figure 11)
    goal       four ranks, with links of 250 Mb/s from the first step on: when the smoothed training perplexity stays
               within 1.02 times the last one of DDP (figure 20)

As in the paper, a quantizer (int8) and a sparsifier (topk) are compared as well. Iterations are timed at the end of the
training, at a fiftieth of its learning rate, where `gcomp` cuts most. The time to the goal is that of a training from
its start.

Source: GCOMP (SoCC 2024), sections 7.2, 7.4 and 7.6. Differences: a small model on two cores for all ranks instead of
ResNet-50 and BERT on a GPU and 12 cores per rank; slower links, which take a similar share of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.options import Seconds
from benchmarks.papers.hipress import convergence
from gradwire.bench import records
from gradwire.bench.methods import DDP_FP16, DDP_FP32
from gradwire.bench.results import TrainingResult
from gradwire.bench.table import rate_text
from gradwire.bench.text import SourceText
from gradwire.bench.training import TrainingOptions

NAME = "gcomp-lab"
Row = dict[str, Any]
RATES = ("100mbit", "250mbit", "1gbit")
TRAIN_RATE = "250mbit"
RANKS = (2, 4)
METHODS = (
    DDP_FP32, DDP_FP16, "lossless@ring", "gcomp@ring", "gcomp@scatter_reduce", "int8", "topk:ratio=0.01",
)  # fmt: skip


def options(ranks: int, steps: int, seconds: float) -> TrainingOptions:
    """Options for a number of ranks. Only the largest number of ranks trains; the others only time iterations."""
    learns = ranks == RANKS[-1]
    return TrainingOptions(
        methods=METHODS,
        ranks=ranks,
        rates=RATES,
        steps=steps if learns else 1,
        train_rate=TRAIN_RATE if learns else None,
        timed_seconds=seconds,
        deadline_seconds=3600.0,
    )


def figures(results: Sequence[TrainingResult]) -> Iterator[dict[str, Any]]:
    """Figures of `gradwire bench training` for each number of ranks, and loss curves for the largest."""
    *others, largest = results
    for result in others:
        yield from ({**row, "benchmark": NAME} for row in records.rows(result) if "rate" in row)
    yield from convergence.figures(largest, NAME, TRAIN_RATE)


def table(rows: Sequence[Row]) -> str:
    """Table of milliseconds per iteration, sentences per second and processor time at each rate, then of losses."""
    values = {(row["ranks"], row["method"], row.get("rate"), row["metric"]): row["value"] for row in rows}
    lines = []
    for ranks in dict.fromkeys(key[0] for key in values):
        lines.append(f"{ranks} ranks: ms per step, sentences per second, processor ms per rank and step")
        lines.append(f"{'':34}" + "".join(f"{rate_text(rate):>24}" for rate in RATES))
        for method in dict.fromkeys(key[1] for key in values):
            cells = ""
            for rate in RATES:
                step, processor = (values.get((ranks, method, rate, name), 0.0) for name in ("step", "processor"))
                if step:
                    cells += f"{1e3 * step:9,.0f}{ranks * SourceText.batch_size / step:8,.0f}{1e3 * processor:7,.0f}"
            lines.append(f"{convergence.short(method):34}{cells}")
    return "\n".join([*lines, convergence.table(rows)])


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Loss curves."""
    convergence.plot(rows, folder)


def run(steps: Annotated[int, typer.Option(help="Steps of the training.")] = 80, seconds: Seconds = 4.0) -> list[Row]:
    """Run all numbers of ranks."""
    from gradwire.cli.bench import run_with_bars

    return list(figures([run_with_bars(options(ranks, steps, seconds)) for ranks in RANKS]))
