"""Trainings with `lossless` and `gcomp` in the lab: figures 11, 15, 16 and 20 of GCOMP's paper.

Two ranks, then four, train the text workload, a residual network over characters with 6.3 million parameters, each on a
host of its own:

    step       seconds per iteration at four rates, and sentences per second (figures 15 and 16)
    processor  seconds of processor time per rank and iteration, of all threads (figure 11)
    goal       four ranks, with links of 250 Mb/s, 1 Gb/s and 2.5 Gb/s from the first step on: when the smoothed
               training perplexity stays within 1.02 times the last one of DDP (figure 20)

As in the paper, a quantizer (int8) and a sparsifier (topk) are compared as well. Iterations are timed at the end of the
training, at a fiftieth of its learning rate, where `gcomp` cuts most. The time to the goal is that of a training from
its start. Each number of ranks at each rate is a part of the record, so the command may be stopped and started again.
Times need a machine that does nothing else.

Source: GCOMP (SoCC 2024), sections 7.2, 7.4 and 7.6. Differences: a small model on two cores for all ranks instead of
ResNet-50 and BERT on a GPU and 12 cores per rank; slower links, which take a similar share of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.keys import key_of
from benchmarks.options import Rates, Seconds, choose
from benchmarks.papers.hipress import convergence
from gradwire.bench import records
from gradwire.bench.methods import DDP_FP16, DDP_FP32
from gradwire.bench.results import TrainingResult
from gradwire.bench.table import rate_text
from gradwire.bench.text import SourceText
from gradwire.bench.training import TrainingOptions

NAME = "gcomp-lab"
Row = dict[str, Any]
RATES = ("100mbit", "250mbit", "1gbit", "2.5gbit")
TRAIN_RATES = RATES[1:]
RANKS = (2, 4)
KEY, CHOICES = ("ranks", "rate"), ("ranks", "rates")
METHODS = (
    DDP_FP32, DDP_FP16, "lossless@ring", "lossless:code=fixed@ring", "gcomp@ring", "gcomp@scatter_reduce", "int8",
    "topk:ratio=0.01",
)  # fmt: skip


def learns(ranks: int, rate: str) -> bool:
    """Whether the whole training runs at this rate. Otherwise iterations are timed only."""
    return ranks == RANKS[-1] and rate in TRAIN_RATES


def options(ranks: int, rate: str, steps: int, seconds: float) -> TrainingOptions:
    """Options of one part."""
    trains = learns(ranks, rate)
    return TrainingOptions(
        methods=METHODS,
        ranks=ranks,
        rates=(rate,),
        steps=steps if trains else 1,
        train_rate=rate if trains else None,
        timed_seconds=seconds,
        deadline_seconds=3600.0,
    )


def figures(result: TrainingResult, rate: str) -> Iterator[dict[str, Any]]:
    """Figures of one part: those of `gradwire bench training`, and loss curves if it was a whole training."""
    if learns(result.ranks, rate):
        found = convergence.figures(result, NAME, rate)
    else:
        found = ({**row, "benchmark": NAME} for row in records.rows(result) if "rate" in row)
    yield from ({**row, "rate": row.get("rate", rate)} for row in found)


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
    for rate, trained in of_trainings(rows).items():
        lines += [f"{RANKS[-1]} ranks, a training at {rate_text(rate)}", convergence.table(trained)]
    return "\n".join(lines)


def of_trainings(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of the whole trainings, by rate."""
    trained = [row["rate"] for row in rows if row["metric"] == "training_time"]
    return {rate: [row for row in rows if row["ranks"] == RANKS[-1] and row["rate"] == rate] for rate in trained}


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Loss curves, in a folder for each rate."""
    for rate, trained in of_trainings(rows).items():
        convergence.plot(trained, folder / rate)


def run(
    steps: Annotated[int, typer.Option(help="Steps of the training.")] = 80,
    seconds: Seconds = 4.0,
    ranks: Annotated[str, typer.Option(help="Some of the numbers of ranks.")] = "",
    rates: Rates = "",
    done: Set[tuple[str, ...]] = frozenset(),
) -> Iterator[list[Row]]:
    """Run all parts that the record does not have."""
    from gradwire.cli.bench import run_with_bars

    for number in choose(ranks, RANKS):
        for rate in choose(rates, RATES):
            if key_of({"ranks": number, "rate": rate}, KEY) not in done:
                yield list(figures(run_with_bars(options(number, rate, steps, seconds)), rate))
