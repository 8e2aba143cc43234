"""Trainings with `lossless` and `gcomp` in the lab: figures 11, 15, 16 and 20 of GCOMP's paper.

    python -m benchmarks.papers.gcomp.lab                # 15 minutes: benchmarks/results/gcomp-lab.csv
    python -m benchmarks.papers.gcomp.lab --out FOLDER   # and the plot

Two ranks, then four, train the text workload, a transformer of 6.3 million parameters, each on a host of its own:

    step       seconds of an iteration at three rates, and how many sentences a second that is (figures 15 and 16)
    processor  seconds of processor time a rank and iteration, all threads together (figure 11)
    goal       four ranks, with links of 250 Mb/s from the first step on: when the smoothed training loss is, for good,
               within 1.02 times the perplexity that DDP has last (figure 20)

beside a quantiser (int8) and a sparsifier (topk), as in the paper. Iterations are timed at the end of the training, at
a fiftieth of its learning rate, where `gcomp` cuts most; the seconds to the goal are those of a training from its
beginning.

Source: GCOMP (SoCC 2024), sections 7.2, 7.4 and 7.6. Differences: a small transformer on two cores for all ranks in
place of ResNet-50 and BERT on a GPU and 12 cores a rank; slower links, which take as large a share of a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers.hipress import convergence
from gradwire.bench.methods import DDP_FP16, DDP_FP32
from gradwire.bench.records import rows, write_figures
from gradwire.bench.results import TrainingResult
from gradwire.bench.table import rate_text, short_label
from gradwire.bench.training import TrainingOptions

NAME = "gcomp-lab"
RESULTS = Path(f"benchmarks/results/{NAME}.csv")
RATES = ("100mbit", "250mbit", "1gbit")
TRAIN_RATE = "250mbit"
RANKS = (2, 4)
METHODS = (
    DDP_FP32, DDP_FP16, "lossless@ring", "gcomp@ring", "gcomp@scatter_reduce", "int8", "topk:ratio=0.01",
)  # fmt: skip


def options(ranks: int, steps: int, seconds: float) -> TrainingOptions:
    """With fewer ranks than the most, iterations are timed and nothing is learnt."""
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
    """What `gradwire bench training` writes for each number of ranks, and the curves of the most."""
    *others, largest = results
    for result in others:
        yield from ({**row, "benchmark": NAME} for row in rows(result) if "rate" in row)
    yield from convergence.figures(largest, NAME, TRAIN_RATE)


def text(result: TrainingResult) -> str:
    """Milliseconds of an iteration at each rate, sentences a second, and processor time beside it."""
    lines = [f"{result.ranks} ranks: ms a step, sentences a second, processor ms of a rank and step"]
    lines.append(f"{'':34}" + "".join(f"{rate_text(rate):>24}" for rate in result.rates))
    for entry in result.results:
        cells = "".join(
            f"{1e3 * time.step.median:9,.0f}{result.ranks * result.batch_size / time.step.median:8,.0f}"
            f"{1e3 * time.processor:7,.0f}"
            for time in entry.times
        )
        lines.append(f"{short_label(entry):34}{cells}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="of the training")
    parser.add_argument("--seconds", type=float, default=4.0, help="for which a method is timed at a rate")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, help="folder for the plot")
    arguments = parser.parse_args(argv)
    if arguments.out:
        from gradwire.bench.extras import need

        need("matplotlib", extra="report", purpose="the plot")
    from gradwire.cli.bench import run_with_bars

    results = [run_with_bars(options(ranks, arguments.steps, arguments.seconds)) for ranks in RANKS]
    write_figures(NAME, figures(results), arguments.csv, more_columns=("step", "seconds"))
    for result in results:
        print(text(result))
    print(convergence.text(results[-1]))
    print(f"Figures: {arguments.csv.resolve()}")
    if arguments.out:
        convergence.plot(results[-1], arguments.out / "loss.svg", TRAIN_RATE)
        print(f"Plot: {(arguments.out / 'loss.svg').resolve()}")


if __name__ == "__main__":
    main()
