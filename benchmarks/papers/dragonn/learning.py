"""Shared by the trainings of sparsifiers, `extreme_classification` and `vision`.

Accuracy by step is measured in whole trainings, one for each seed, on links as they are, since the rate does not affect
what is learned. Step times are measured in short trainings of the same model in the lab, at each rate. They are
compared with each other, so one job times all methods, one after another. Both together yield accuracy by time. Each
training is a part of the record; parts that the record has are not run again.
"""
# Shapes: W = ranks

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.intervals import interval
from benchmarks.options import Seconds, Seeds, choose
from benchmarks.plotting import bar_places, figure
from gradwire.bench.results import StepTime, TrainingResult
from gradwire.bench.training import TrainingOptions, run

RANKS = 4
RATES = ("100mbit", "1gbit")
PARTS = ("learn", "time")
SEEDS = 3
KEY, CHOICES = ("method", "seed"), ("seeds", "designs", "parts")
GOAL = 0.97  # of the dense training's last accuracy: what a method is to reach
EVERY = 10  # steps between the points of a loss curve that are written down
COLORS = ("#3e4c59", "#17a08a", "#7bc8bb", "#2f6db5", "#b3590f", "#8a4fbf", "#c2324f")
Row = dict[str, Any]


@dataclass(frozen=True)
class Design:
    """One way to synchronize gradients.

    Attributes:
        label: Display name.
        method: Name of the method, see `gradwire.bench.methods`. ``{warmup}`` is replaced by the steps of a warm-up.
    """

    label: str
    method: str

    def learned(self, steps: int) -> str:
        """The method for a training of `steps` steps. A quarter of them are warm-up."""
        return self.method.format(warmup=f":warmup={steps // 4}")

    @property
    def timed(self) -> str:
        """The method after its warm-up."""
        return self.method.format(warmup="")


@dataclass(frozen=True)
class Study:
    """One workload and the methods compared on it.

    Attributes:
        name: Name of the benchmark and its record.
        workload: Class of the workload, see `gradwire.bench.workloads.make_workload`.
        measure: Meaning of accuracy.
        designs: Methods. The others are compared with the first.
        steps: Steps of a whole training.
        validate_every: Steps between the points of an accuracy curve.
    """

    name: str
    workload: str
    measure: str
    designs: tuple[Design, ...]
    steps: int
    validate_every: int

    def run(
        self,
        data: Annotated[Path, typer.Option(help="Folder of the data.")],
        steps: Annotated[int | None, typer.Option(help="Steps of a whole training.")] = None,
        seeds: Seeds = SEEDS,
        seconds: Seconds = 5.0,
        designs: Annotated[str, typer.Option(help="Labels of designs to learn, such as dense,topk.")] = "",
        parts: Annotated[str, typer.Option(help="learn, time, or both.")] = "",
        *,
        done: Set[tuple[str, ...]],
    ) -> Iterator[list[Row]]:
        """Run all trainings that the record does not have. The figures of each are written when it ends.

        If one of the chosen designs is not timed yet, all designs are timed again.
        """
        chosen, kinds = choose(designs, [design.label for design in self.designs]), choose(parts, PARTS)
        for seed in range(seeds) if "learn" in kinds else ():
            for design in self.designs:
                if design.label in chosen and (design.label, str(seed)) not in done:
                    yield list(self.learn(design, data, steps or self.steps, seed))
        if "time" in kinds and any((label, "") not in done for label in chosen):
            yield list(self.time(data, seconds))

    def learn(self, design: Design, data: Path, steps: int, seed: int) -> Iterator[Row]:
        """Run a whole training, for losses and the accuracy curve."""
        result = self._train(
            [design.learned(steps)], data, steps=steps, validate_every=self.validate_every, rates=(None,),
            timed_seconds=0.1, buckets_mb=(25.0,), lab=False, seed=seed,
        )  # fmt: skip
        entry = result.results[0]
        yield from learning_figures(design, seed, result.num_parameters, entry.losses, entry.validations)

    def time(self, data: Path, seconds: float) -> Iterator[Row]:
        """Run a short training of each design at each rate, for step times. One job runs them all."""
        methods = [design.timed for design in self.designs]
        result = self._train(
            methods, data, steps=3, rates=RATES, timed_seconds=seconds, buckets_mb=(4.0, 25.0), lab=True
        )
        for design, entry in zip(self.designs, result.results, strict=True):
            yield from step_figures(design, result.num_parameters, entry.times)

    def _train(self, methods: Sequence[str], data: Path, **options: Any) -> TrainingResult:
        workload = f"{self.workload}={data.resolve()}"
        return run(TrainingOptions(workload=workload, methods=methods, ranks=RANKS, deadline_seconds=3600.0, **options))

    def table(self, rows: Sequence[Row]) -> str:
        """Markdown table: accuracy, its difference from the first design for each seed, and speed."""
        found = read(rows, self)
        if not found or found[0].label != self.designs[0].label or not found[0].steps:
            return f"There is no table before {self.designs[0].label!r} is learned and timed."
        return table(self, found)

    def plot(self, rows: Sequence[Row], folder: Path) -> None:
        """Plot accuracy by step, and, at each rate, steps per second and accuracy by time."""
        plot(self, read(rows, self), folder / f"{self.name}.svg")


def learning_figures(
    design: Design, seed: int, parameters: int, losses: list[float], validations: list[tuple[int, float, float]]
) -> Iterator[Row]:
    """Rows of one whole training."""
    fixed = {**_fixed(design, parameters), "seed": seed}
    for step, loss, accuracy in validations:
        yield {**fixed, "metric": "accuracy", "value": accuracy, "unit": "share", "step": step}
        yield {**fixed, "metric": "validation_loss", "value": loss, "unit": "nats", "step": step}
    for at in range(0, len(losses) - EVERY + 1, EVERY):
        mean = statistics.fmean(losses[at : at + EVERY])
        yield {**fixed, "metric": "training_loss", "value": mean, "unit": "nats", "step": at + EVERY}


def step_figures(design: Design, parameters: int, times: Sequence[StepTime]) -> Iterator[Row]:
    """Rows of step times at each rate."""
    for time in times:
        here, step = {**_fixed(design, parameters), "rate": time.rate}, time.step
        spread = {"value": step.median, "p20": step.p20, "p80": step.p80, "samples": step.size}
        yield {**here, "metric": "step", "unit": "s", **spread}
        yield {**here, "metric": "step_without_communication", "value": time.compute, "unit": "s"}
        yield {**here, "metric": "ideal_step", "value": time.ideal, "unit": "s"}
        yield {**here, "metric": "encode", "value": time.split.encode, "unit": "s"}
        yield {**here, "metric": "decode", "value": time.split.decode, "unit": "s"}
        yield {**here, "metric": "bytes", "value": time.bytes, "unit": "B"}


def _fixed(design: Design, parameters: int) -> Row:
    return {"method": design.label, "ranks": RANKS, "size": parameters, "dtype": "float32", "source": "measured"}


# -- tables and plots ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """One method as read from a record.

    Attributes:
        curves: Accuracy by step, of each seed.
        steps: Seconds per step, by rate. Empty if the method was not timed.
        ideal: Seconds of the ideal step, by rate.
        megabytes: Megabytes sent per rank and step, at the first rate; NaN if the method was not timed.
    """

    label: str
    curves: tuple[dict[int, float], ...]
    steps: dict[str, float]
    ideal: dict[str, float]
    megabytes: float

    @property
    def accuracy(self) -> dict[int, float]:
        """Mean accuracy of all seeds, by step."""
        return {step: statistics.fmean(each[step] for each in self.curves) for step in self.curves[0]}

    @property
    def seeds(self) -> tuple[float, ...]:
        """Final accuracy of each seed."""
        return tuple(each[max(each)] for each in self.curves)

    @property
    def middle(self) -> tuple[float, ...]:
        """Mean accuracy over the second quarter of training, of each seed."""
        return tuple(
            statistics.fmean(value for step, value in each.items() if max(each) / 4 < step <= max(each) / 2)
            for each in self.curves
        )

    @property
    def last(self) -> float:
        """Final accuracy, averaged over seeds."""
        return statistics.fmean(self.seeds)

    def crossings(self, accuracy: float) -> list[int | None]:
        """For each seed, the first step from which its accuracy stays at or above this value; None without one."""
        return [crossing(each, accuracy) for each in self.curves]

    def reaches(self, accuracy: float) -> float | None:
        """Mean of `crossings`; None if a seed has none."""
        found = [step for step in self.crossings(accuracy) if step is not None]
        return statistics.fmean(found) if len(found) == len(self.curves) else None


def crossing(curve: dict[int, float], accuracy: float) -> int | None:
    """First step from which a curve stays at or above this value. None if there is none."""
    found = None
    for step in sorted(curve, reverse=True):
        if curve[step] < accuracy:
            break
        found = step
    return found


def read(rows: Sequence[Row], study: Study) -> list[Found]:
    """Read the designs that were trained from the rows of a record."""
    found = []
    for design in study.designs:
        mine = [row for row in rows if row["method"] == design.label]
        curves: dict[Any, dict[int, float]] = {}
        for row in mine:
            if row["metric"] == "accuracy":
                curves.setdefault(row["seed"], {})[row["step"]] = row["value"]
        steps, ideal, sent = (
            {row["rate"]: row["value"] for row in mine if row["metric"] == metric}
            for metric in ("step", "ideal_step", "bytes")
        )
        if curves:
            by_seed = tuple(curves[seed] for seed in sorted(curves))
            found.append(Found(design.label, by_seed, steps, ideal, sent.get(RATES[0], math.nan) / 1e6))
    return found


def table(study: Study, found: Sequence[Found]) -> str:
    """Markdown table: accuracy at the end and in the second quarter, steps to a goal, and speed."""
    dense = found[0]
    goal = GOAL * dense.last
    rates = " | ".join(f"{rate}: step, × dense, ÷ ideal, × dense to {goal:.1%}" for rate in RATES)
    lines = [
        f"| | {study.measure} | points above {dense.label} | second quarter | points above {dense.label} | "
        f"steps to {goal:.1%} | MB per step | {rates} |",
        "|---|---|---|---|---|---|---|" + "---|" * len(RATES),
    ]
    for each in found:
        cells = [
            f"{each.last:.1%}", _apart(each.seeds, dense.seeds) if each is not dense else "",
            f"{statistics.fmean(each.middle):.1%}", _apart(each.middle, dense.middle) if each is not dense else "",
            _steps_to(each, goal), "" if math.isnan(each.megabytes) else f"{each.megabytes:.3g}",
            *(_speed(each, dense, goal, rate) for rate in RATES),
        ]  # fmt: skip
        lines.append(f"| {each.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _apart(values: Sequence[float], others: Sequence[float]) -> str:
    """Mean difference in points, of the seeds that both have, and its 95 % interval."""
    return _with_interval([100 * (a - b) for a, b in zip(values, others)], "+.1f", ".1f")


def _with_interval(values: Sequence[float], form: str, form_of_half: str) -> str:
    mean, half = interval(values)
    return f"{mean:{form}}" + ("" if math.isnan(half) else f" ± {half:{form_of_half}}")


def _steps_to(found: Found, goal: float) -> str:
    """Mean of the seeds with its interval, and each seed's."""
    each = found.crossings(goal)
    reached = [step for step in each if step is not None]
    mean = _with_interval(reached, ".0f", ".0f") if len(reached) == len(each) else ""
    listed = ", ".join("never" if step is None else str(step) for step in each)
    return "never" if not reached else f"{mean} ({listed})".strip()


def _speed(each: Found, dense: Found, goal: float, rate: str) -> str:
    if rate not in each.steps:
        return "not timed"
    reached, first = each.reaches(goal), dense.reaches(goal)
    faster, over = dense.steps[rate] / each.steps[rate], each.steps[rate] / each.ideal[rate]
    sooner = "never" if reached is None or first is None else f"{faster * first / reached:.2f}"
    return f"{1e3 * each.steps[rate]:,.0f} ms, {faster:.2f}, {over:.2f}, {sooner}"


def plot(study: Study, found: Sequence[Found], path: Path) -> None:
    """See `Study.plot`."""
    with figure(path, columns=2 + len(RATES), size=(18, 4.2)) as axes:
        by_step, speed, *by_time = axes[0]
        for index, (each, color) in enumerate(zip(found, COLORS)):
            steps = sorted(each.accuracy)
            values = [100 * each.accuracy[step] for step in steps]
            by_step.plot(steps, values, color=color, label=each.label)
            if not each.steps:
                continue
            places = bar_places(index, len(found), len(RATES))
            speed.bar(places, [1 / each.steps[rate] for rate in RATES], 0.8 / len(found), color=color)
            for axis, rate in zip(by_time, RATES):
                axis.plot([step * each.steps[rate] for step in steps], values, color=color)
        by_step.set(xlabel="step", ylabel=f"{study.measure}, %")
        by_step.legend(fontsize=8)
        speed.set(yscale="log", ylabel="steps a second (logarithmic)")
        speed.set_xticks(range(len(RATES)), RATES)
        speed.set_yticks([0.2, 0.5, 1, 2, 5, 10], ["0.2", "0.5", "1", "2", "5", "10"])
        speed.set_yticks([], minor=True)
        for axis, rate in zip(by_time, RATES):
            axis.set(xscale="log", xlabel=f"seconds of training at {rate} (logarithmic)")
