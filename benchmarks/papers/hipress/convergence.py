"""An LSTM language model with DGC on a ring and minmax on co-located servers, in the lab: HiPress's figure 13.

`--data` is a folder with the files `valid.txt` and `test.txt` of WikiText-2 (wiki.valid.tokens and wiki.test.tokens in
some archives; raw or not), which the authors of "Pointer sentinel mixture models" (Merity et al. 2016) published. Four
ranks train on the words of the smaller file and hold out the other. Perplexity is that of the batches, smoothed. Times
are measured, with all links at 100 Mb/s from the first step to the last, on a machine whose cores compute for all
ranks.

Source: HiPress (SOSP 2021), figure 13, left. Differences: a small model for some hundred steps, not to convergence;
minmax with 2 bits is what the paper calls TernGrad. DGC's warm-up takes a third of the steps. It uses no momentum
correction, since the optimizer is plain SGD, and gradients are clipped after they are averaged instead of on each rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.options import Seconds
from benchmarks.plotting import figure
from gradwire.bench import methods, records
from gradwire.bench.plots import smooth
from gradwire.bench.results import MethodResult, TrainingResult
from gradwire.bench.table import rate_text
from gradwire.bench.training import TrainingOptions

NAME = "convergence-wikitext2"
Row = dict[str, Any]
RATE = "100mbit"
WORDS = "benchmarks.papers.hipress.words.WordText"
EVERY = 5  # steps between the recorded points of a curve
CLOSE = 1.02  # goal of a method, relative to DDP's last perplexity


def compared(steps: int) -> tuple[str, ...]:
    """The methods for a training of `steps` steps."""
    return (methods.DDP_FP32, f"dgc:ratio=0.001:warmup={steps // 3}@ring", "minmax:bits=2@scatter_reduce")


def curve(entry: MethodResult) -> list[tuple[int, float, float]]:
    """Step, seconds and smoothed training perplexity of every step."""
    seconds = itertools.accumulate(entry.train_seconds)
    losses = smooth(entry.losses)
    return [(step, time, math.exp(min(loss, 50.0))) for step, (time, loss) in enumerate(zip(seconds, losses), start=1)]


def reached(entry: MethodResult, perplexity: float) -> tuple[int, float] | None:
    """The first step from which the perplexity stays at or below this, and its seconds; None for never."""
    found = None
    for step, seconds, value in reversed(curve(entry)):
        if value > perplexity:
            break
        found = step, seconds
    return found


def figures(result: TrainingResult, benchmark: str = NAME, rate: str = RATE) -> Iterator[dict[str, Any]]:
    """Figures of `gradwire bench training`, and curves at the rate of the training."""
    goal = CLOSE * curve(result.results[0])[-1][2]
    fixed = {"dtype": "float32", "size": result.num_parameters, "ranks": result.ranks, "rate": rate}
    yield from ({**row, "benchmark": benchmark} for row in records.rows(result))
    for entry in result.results:
        here = {**fixed, "method": entry.method, "source": "measured" if result.shaped else "predicted"}
        assert entry.validation_loss is not None, "it was trained"
        perplexity = {"value": math.exp(entry.validation_loss), "unit": "perplexity"}
        training = {"value": sum(entry.train_seconds), "unit": "s", "step": len(entry.losses)}
        yield {**here, "metric": "training_time", **training}
        yield {**here, "metric": "validation_perplexity", **perplexity, "step": len(entry.losses)}
        if found := reached(entry, goal):
            yield {**here, "metric": "seconds_to_goal", "value": found[1], "unit": "s", "step": found[0]}
        for step, seconds, value in curve(entry):
            if step % EVERY == 0:
                point = {"step": step, "seconds": seconds, "value": value, "unit": "perplexity"}
                yield {**here, "metric": "training_perplexity", **point}


def value(rows: Sequence[Row], method: str, metric: str, name: str = "value") -> float | None:
    """The last value of a metric for a method."""
    found = [row[name] for row in rows if (row["method"], row["metric"]) == (method, metric)]
    return found[-1] if found else None


def short(method: str) -> str:
    """Display name of a method without the word gradwire."""
    return methods.label(method).removeprefix("gradwire ")


def table(rows: Sequence[Row]) -> str:
    """Table of perplexities, and of the step and time at which each method reached the goal."""
    trained = [row["method"] for row in rows if row["metric"] == "training_time"]
    goal = f"reaches {CLOSE * (value(rows, trained[0], 'training_perplexity') or math.nan):.0f}"
    lines = [f"{'':34}{'held out':>10}{'training':>10}{'all steps, s':>14}{goal:>16}{'seconds':>9}"]
    for method in trained:
        step, seconds = value(rows, method, "seconds_to_goal", "step"), value(rows, method, "seconds_to_goal")
        when = f"{f'step {step}':>16}{seconds:9.1f}" if step else f"{'never':>16}{'':9}"
        held_out, training, total = (
            value(rows, method, metric) for metric in ("validation_perplexity", "training_perplexity", "training_time")
        )
        lines.append(f"{short(method):34}{held_out:10.1f}{training or math.nan:10.1f}{total:14.1f}{when}")
    return "\n".join(lines)


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Plot perplexity by step and by time."""
    points = [row for row in rows if row["metric"] == "training_perplexity"]
    with figure(folder / "convergence.svg", columns=2, size=(11, 4.2), sharey=True) as axes:
        left, right = axes[0]
        for method in dict.fromkeys(row["method"] for row in points):
            mine = [row for row in points if row["method"] == method]
            left.plot([row["step"] for row in mine], [row["value"] for row in mine], label=methods.label(method))
            right.plot([row["seconds"] for row in mine], [row["value"] for row in mine])
        left.set(yscale="log", xlabel="step", ylabel="training perplexity (logarithmic, smoothed)")
        right.set(xlabel=f"seconds at {rate_text(points[0]['rate'])}")
        left.legend()


def run(
    data: Annotated[Path, typer.Option(help="Folder with valid.txt and test.txt of WikiText-2.")],
    steps: Annotated[int, typer.Option(help="Training steps.")] = 240,
    seconds: Seconds = 20.0,
) -> list[Row]:
    """Train with each method."""
    from gradwire.cli.bench import run_with_bars, show

    options = TrainingOptions(
        workload=f"{WORDS}={data.resolve()}", methods=compared(steps), rates=(RATE,), steps=steps, train_rate=RATE,
        timed_seconds=seconds, buckets_mb=(4.0, 25.0), deadline_seconds=3600.0,
    )  # fmt: skip
    result = run_with_bars(options)
    show(result)
    return list(figures(result))
