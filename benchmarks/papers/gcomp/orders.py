"""Are losses with `gcomp` within the spread of exact sums in other orders?

The trainings of `benchmarks.papers.gcomp.loss`, with exact sums in each of the twelve orders of four ranks that differ
(the first two may change places), and with `gcomp`. The distance of two trainings is the mean over all steps of the
difference between their losses; that of one training from the orders is its mean distance from all others. If
`gcomp` were one more order, each of the thirteen trainings would be the most distant one in one seed of thirteen, and
would end with the smallest or the largest loss in two of thirteen.

Source: GCOMP (SoCC 2024), section 7.6, whose figures 18 and 19 have one training of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import permutations
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.keys import key_of
from benchmarks.options import Cifar10, Sst2, choose
from benchmarks.papers.gcomp.loss import BATCH, CHOSEN, RANKS, SEEDS, Job
from benchmarks.papers.gcomp.models import Training, trainings

ORDERS = {"".join(map(str, order)): order for order in permutations(range(RANKS)) if order[0] < order[1]}
GCOMP = "gcomp"
DISTANCE, END = "distance from the orders", "loss, last quarter"
KEY, CHOICES = ("workload", "optimizer", "seed"), ("optimizers", "seeds")
Row = dict[str, Any]


def part(training: Training, optimizer: str, seed: int, steps: int) -> Iterator[Row]:
    """All figures of one seed."""
    jobs = {name: Job(training, optimizer, "exact", seed, order) for name, order in ORDERS.items()}
    jobs[GCOMP] = Job(training, optimizer, GCOMP, seed)
    losses = {name: np.array([job.step(number) for number in range(steps)]) for name, job in jobs.items()}
    fixed = {"workload": training.name, "optimizer": optimizer, "seed": seed, "dtype": "float32", "ranks": RANKS,
             "source": "measured", "samples": steps, "unit": "nat"}  # fmt: skip
    for name, away in mean_distances(losses).items():
        yield {**fixed, "method": name, "metric": DISTANCE, "value": away}
    for name, curve in losses.items():
        yield {
            **fixed,
            "method": name,
            "metric": END,
            "value": float(curve[-(steps // 4 or 1) :].mean()),
        }


def mean_distances(losses: dict[str, np.ndarray]) -> dict[str, float]:
    """Mean distance of each training from all orders but itself."""
    return {
        name: float(np.mean([np.abs(curve - losses[other]).mean() for other in ORDERS if other != name]))
        for name, curve in losses.items()
    }


def run(
    cifar10: Cifar10,
    sst2: Sst2,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 200,
    optimizers: Annotated[str, typer.Option(help="Some of the optimizers, with semicolons in between.")] = "",
    seeds: Annotated[str, typer.Option(help="Some of the seeds.")] = "",
    done: Set[tuple[str, ...]] = frozenset(),
) -> Iterator[list[Row]]:
    """Train with each order, seed by seed. Each seed of a training is a part of the record, which may be resumed."""
    both = trainings(cifar10, sst2, BATCH)
    for seed in choose(seeds, SEEDS):
        for optimizer in choose(optimizers, CHOSEN, ";"):
            for training in both:
                where = {"workload": training.name, "optimizer": optimizer, "seed": seed}
                if key_of(where, KEY) not in done:
                    yield list(part(training, optimizer, seed, steps))


def table(rows: Sequence[Row]) -> str:
    """One line for each seed: distances of the orders and of `gcomp`, and the losses that they end with."""
    found: dict[tuple[str, ...], dict[tuple[str, str], float]] = {}
    for row in rows:
        found.setdefault(key_of(row, KEY), {})[row["metric"], row["method"]] = row["value"]
    lines = [
        "| | seed | distance of orders: least, median, most | `gcomp` | orders farther away "
        "| loss of the last quarter, orders | `gcomp` |",
        "|---" * 7 + "|",
    ]
    for (workload, optimizer, seed), values in found.items():
        away, others = values[DISTANCE, GCOMP], sorted(values[DISTANCE, name] for name in ORDERS)
        spread = ", ".join(f"{value:.2g}" for value in (others[0], float(np.median(others)), others[-1]))
        farther = sum(value > away for value in others)
        ends = [values[END, name] for name in ORDERS]
        lines.append(
            f"| {workload}, {optimizer} | {seed} | {spread} | {away:.2g} | {farther} of {len(others)} "
            f"| {min(ends):.7g} to {max(ends):.7g} | {values[END, GCOMP]:.7g} |"
        )
    return "\n".join(lines)
