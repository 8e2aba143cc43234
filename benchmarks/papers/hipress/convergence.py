"""An LSTM language model with DGC on a ring and minmax on co-located servers, in the lab: HiPress's figure 13.

    python -m benchmarks.papers.hipress.convergence --data wikitext-2  # 10 minutes: results/convergence-wikitext2.csv

`--data` is a folder with the files `valid.txt` and `test.txt` of WikiText-2 (wiki.valid.tokens and wiki.test.tokens in
some archives; raw or not), which the authors of "Pointer sentinel mixture models" (Merity et al. 2016) made public:
download it from where you get your data sets. Four ranks train on the smaller file's words and hold out the other.
Perplexity is that of the batches, smoothed; seconds are measured, with all links at 100 Mb/s from the first step to
the last, on a machine whose cores compute for all ranks.

Source: HiPress (SOSP 2021), figure 13, left. Differences: a small model for some hundred steps, not to convergence;
minmax of 2 bits is what the paper calls TernGrad. DGC's warm-up takes a third of the steps; its momentum correction is
not there, nor needed here, for the optimizer is plain SGD; gradients are clipped after they are averaged, as without
DGC, and not before on each rank.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradwire.bench import methods
from gradwire.bench.plots import smooth
from gradwire.bench.records import rows, write_figures
from gradwire.bench.results import MethodResult, TrainingResult
from gradwire.bench.table import rate_text, short_label
from gradwire.bench.training import TrainingOptions

NAME = "convergence-wikitext2"
RESULTS = Path(f"benchmarks/results/{NAME}.csv")
RATE = "100mbit"
EVERY = 5  # steps between the points of a curve that are written down
CLOSE = 1.02  # of DDP's last perplexity: what a method is to reach


def compared(steps: int) -> tuple[str, ...]:
    """The methods, for a training of so many steps."""
    return (methods.DDP_FP32, f"dgc:ratio=0.001:warmup={steps // 3}@ring", "minmax:bits=2@scatter_reduce")


def curve(entry: MethodResult) -> list[tuple[int, float, float]]:
    """Step, seconds and smoothed training perplexity of every step."""
    seconds = itertools.accumulate(entry.train_seconds)
    losses = smooth(entry.losses)
    return [(step, time, math.exp(min(loss, 50.0))) for step, (time, loss) in enumerate(zip(seconds, losses), start=1)]


def reached(entry: MethodResult, perplexity: float) -> tuple[int, float] | None:
    """The first step, and its seconds, from which on the perplexity stays at or below this; None for never."""
    found = None
    for step, seconds, value in reversed(curve(entry)):
        if value > perplexity:
            break
        found = step, seconds
    return found


def figures(result: TrainingResult, benchmark: str = NAME, rate: str = RATE) -> Iterator[dict[str, Any]]:
    """What `gradwire bench training` writes, and the curves at the rate that it has trained at."""
    goal = CLOSE * curve(result.results[0])[-1][2]
    fixed = {"dtype": "float32", "size": result.num_parameters, "ranks": result.ranks, "rate": rate}
    yield from ({**row, "benchmark": benchmark} for row in rows(result))
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


def text(result: TrainingResult) -> str:
    """A table of what each has reached, and when."""
    goal = CLOSE * curve(result.results[0])[-1][2]
    goal_name = f"reaches {goal:.0f}"
    lines = [f"{'':34}{'held out':>10}{'training':>10}{'all steps, s':>14}{goal_name:>16}{'seconds':>9}"]
    for entry in result.results:
        assert entry.validation_loss is not None, "it was trained"
        found = reached(entry, goal)
        when = f"{f'step {found[0]}':>16}{found[1]:9.1f}" if found else f"{'never':>16}{'':9}"
        lines.append(
            f"{short_label(entry):34}{math.exp(entry.validation_loss):10.1f}{curve(entry)[-1][2]:10.1f}"
            f"{sum(entry.train_seconds):14.1f}{when}"
        )
    return "\n".join(lines)


def plot(result: TrainingResult, path: Path, rate: str = RATE) -> None:
    """Perplexity against steps, and against time."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    for entry in result.results:
        steps, seconds, values = zip(*curve(entry))
        left.plot(steps, values, label=entry.label)
        right.plot(seconds, values, label=entry.label)
    left.set(yscale="log", xlabel="step", ylabel="training perplexity (logarithmic, smoothed)")
    right.set(xlabel=f"seconds at {rate_text(rate)}")
    left.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with valid.txt and test.txt of WikiText-2")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seconds", type=float, default=20.0, help="for which each method is timed")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, help="folder for the plot")
    arguments = parser.parse_args(argv)
    if arguments.out:
        from gradwire.bench.extras import need

        need("matplotlib", extra="report", purpose="the plot")
    from gradwire.cli.bench import run_with_bars, show

    result = run_with_bars(
        TrainingOptions(
            workload=f"lstm:{arguments.data.resolve()}",
            methods=compared(arguments.steps),
            rates=(RATE,),
            steps=arguments.steps,
            train_rate=RATE,
            timed_seconds=arguments.seconds,
            buckets_mb=(4.0, 25.0),
            deadline_seconds=3600.0,
        )
    )
    show(result)
    write_figures(NAME, figures(result), arguments.csv, more_columns=("step", "seconds"))
    print(text(result))
    print(f"Figures: {arguments.csv.resolve()}")
    if arguments.out:
        plot(result, arguments.out / "convergence.svg")
        print(f"Plot: {(arguments.out / 'convergence.svg').resolve()}")


if __name__ == "__main__":
    main()
