"""The goal, who reaches it and when: the table and plots of `benchmarks.accuracy.time_to_accuracy`.

Losses are those of the validation set, each the mean of the last three validations. The goal is the level of DDP fp32
at the end: the mean over its seeds, plus two standard deviations between them, above which about one in nine of
further trainings with DDP fp32 would end, if there are three seeds (Student's t). A training has reached it at the
first validation from which the loss stays at or below the goal. Seconds are the steps until then, each with the step
time of its method, so they have no other part of the training such as validations. Steps are timed in a replay
of the beginning. If the whole training sent more, they count with the time that the link takes for those bytes. If its
bytes are not recorded, they count as replayed. Steps of `auto` count as those of what it settled on: DDP's own method,
if it is one, which was timed with the best of several bucket sizes. The seconds until it had settled are added, though
it trains in them, too.

Means over seeds have a 95 % interval by Student's t. Differences and speed-ups are taken for each seed, against the
training of DDP with the same seed. Where a seed does not reach the goal there is no mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.compared import Row, phases, settled, trained_as
from benchmarks.intervals import interval
from benchmarks.plotting import COLORS, DENSE, figure, legend_below, plain_numbers
from gradwire.bench.methods import DDP_FP16, DDP_FP32, is_native, is_plan, label
from gradwire.bench.table import rate_text
from gradwire.lab.units import parse_rate
from gradwire.simulate.plots import FAINT

SMOOTHED = 3  # validations
Curve = list[tuple[int, float]]
"""Steps and smoothed losses."""


def smoothed(losses: Sequence[tuple[int, float]]) -> Curve:
    """The mean of each loss and the two before it, as far as there are any."""
    return [
        (step, statistics.fmean(loss for _, loss in losses[max(0, at - SMOOTHED + 1) : at + 1]))
        for at, (step, _) in enumerate(losses)
    ]


def goal_of(curves: Sequence[Curve], deviations: int = 2) -> float:
    """The mean of the last losses, plus their standard deviation times `deviations`."""
    last = [curve[-1][1] for curve in curves]
    return statistics.fmean(last) + (deviations * statistics.stdev(last) if len(last) > 1 else 0.0)


def reached(curve: Curve, goal: float) -> int | None:
    """The first step from which the loss stays at or below the goal; None if there is none."""
    found = None
    for step, loss in reversed(curve):
        if not loss <= goal:  # nor is nan
            break
        found = step
    return found


@dataclass(frozen=True)
class Findings:
    """What a record has about one workload.

    Attributes:
        workload: Name.
        steps: Steps of the trainings: the longest of the record.
        curves: Curve by method and seed.
        accuracies: Accuracy at the end, by method and seed.
        step_seconds: Step time by rate and method.
        replayed_bytes: Bytes of a timed step, by rate and method.
        sent_bytes: Bytes of a step of the trainings, by method, the mean over seeds.
        plans: What each method of ``auto`` settled on, by rate: the name of its training.
        settling: Seconds until it had, by rate and method.
    """

    workload: str
    steps: int
    curves: dict[str, dict[int, Curve]]
    accuracies: dict[str, dict[int, float]]
    step_seconds: dict[tuple[str, str], float]
    replayed_bytes: dict[tuple[str, str], float]
    sent_bytes: dict[str, float]
    plans: dict[str, dict[str, str]]
    settling: dict[tuple[str, str], float]

    @classmethod
    def of(cls, rows: Sequence[Row], workload: str) -> Findings:
        """Read the rows of a record."""
        mine = [row for row in rows if row["workload"] == workload]
        losses = [row for row in mine if row["metric"] == "validation_loss"]
        steps = max((row["steps"] for row in losses), default=0)
        points: dict[str, dict[int, list[tuple[int, float]]]] = {}
        accuracies: dict[str, dict[int, float]] = {}
        for row in losses:
            if row["steps"] == steps:
                points.setdefault(row["method"], {}).setdefault(row["seed"], []).append((row["step"], row["value"]))
                accuracies.setdefault(row["method"], {})[row["seed"]] = row["accuracy"]
        curves = {method: {seed: smoothed(curve) for seed, curve in each.items()} for method, each in points.items()}
        step_seconds = {(row["rate"], row["method"]): row["value"] for row in mine if row["metric"] == "step"}
        replayed_bytes = {(row["rate"], row["method"]): row["value"] for row in mine if row["metric"] == "bytes"}
        sent: dict[str, list[float]] = {}
        for row in mine:
            if row["metric"] == "training_bytes" and row["steps"] == steps:
                sent.setdefault(row["method"], []).append(row["value"])
        sent_bytes = {method: statistics.fmean(each) for method, each in sent.items()}
        autos = dict.fromkeys(row["method"] for row in mine if row["metric"] == "settled")
        plans = {
            auto: {rate: trained_as(plan) for rate, plan in settled(mine, workload, auto).items()} for auto in autos
        }
        settling = {(row["rate"], row["method"]): row["value"] for row in mine if row["metric"] == "settling"}
        return cls(workload, steps, curves, accuracies, step_seconds, replayed_bytes, sent_bytes, plans, settling)

    @property
    def rates(self) -> list[str]:
        """Rates at which steps were timed."""
        return list(dict.fromkeys(rate for rate, _ in self.step_seconds))

    @property
    def methods(self) -> list[str]:
        """Methods that were trained, and those of ``auto``."""
        return [method for method in self.curves if not is_plan(method)] + list(self.plans)

    @property
    def goal(self) -> float | None:
        """The goal; None before DDP fp32 is trained."""
        dense = self.curves.get(DDP_FP32)
        return goal_of(list(dense.values())) if dense else None

    @property
    def dense_loss(self) -> float:
        """Loss of DDP fp32 at the end, the mean over its seeds."""
        return goal_of(list(self.curves[DDP_FP32].values()), deviations=0)

    def trained(self, method: str, rate: str) -> str:
        """The training of a method at a rate."""
        return self.plans[method].get(rate, "") if method in self.plans else method

    def curves_at(self, method: str, rate: str) -> dict[int, Curve]:
        """Curve of each seed."""
        return self.curves.get(self.trained(method, rate), {})

    def seconds_to(self, method: str, rate: str, step: int) -> float | None:
        """Seconds until the end of a step at a rate, from the start of the training on; None if it was not timed."""
        seconds = self.seconds_of(method, rate, step)
        return None if seconds is None else seconds + self.settling.get((rate, method), 0.0)

    def seconds_of(self, method: str, rate: str, steps: int) -> float | None:
        """Seconds of the first steps at a rate, once ``auto`` has settled; None if they were not timed."""
        if is_native(self.trained(method, rate)):
            method = self.trained(method, rate)
        total, left = steps * self._seconds_of_further_bytes(method, rate), steps
        for count, timed in phases(method, self.steps):
            seconds = self.step_seconds.get((rate, timed))
            if seconds is None:
                return None
            total += min(count, left) * seconds
            left -= min(count, left)
        return total

    def _seconds_of_further_bytes(self, method: str, rate: str) -> float:
        """Time that the link takes for what a step of the trainings sent beyond a timed one."""
        sent, bits = self.sent_bytes.get(self.trained(method, rate)), parse_rate(rate)
        timed = [(count, self.replayed_bytes.get((rate, each))) for count, each in phases(method, self.steps)]
        if sent is None or bits is None or any(replayed is None for _, replayed in timed):
            return 0.0
        replayed = sum(count * (each or 0.0) for count, each in timed) / self.steps
        return 8 * max(0.0, sent - replayed) / bits

    def seconds_to_goal(self, method: str, rate: str) -> dict[int, float | None]:
        """For each seed the seconds to the goal; None if it was not reached, or steps were not timed."""
        assert self.goal is not None, "there is a goal"
        steps = {seed: reached(curve, self.goal) for seed, curve in self.curves_at(method, rate).items()}
        return {seed: None if step is None else self.seconds_to(method, rate, step) for seed, step in steps.items()}

    def speedups(self, method: str, rate: str, rival: str) -> list[float]:
        """For each seed how many times sooner than a rival a method reaches the goal; empty if a seed does not."""
        mine, theirs = self.seconds_to_goal(method, rate), self.seconds_to_goal(rival, rate)
        found = [theirs[seed] / mine[seed] for seed in mine if mine[seed] and theirs.get(seed)]  # type: ignore[operator]
        return found if len(found) == len(mine) else []


def read(rows: Sequence[Row]) -> list[Findings]:
    """What a record has about each workload."""
    return [Findings.of(rows, workload) for workload in dict.fromkeys(row["workload"] for row in rows)]


# -- the table -----------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """A Markdown table for each workload and rate."""
    return "\n\n".join(text for found in read(rows) for text in _tables(found))


def _tables(found: Findings) -> Iterator[str]:
    if found.goal is None or not found.rates:
        missing = "trained" if found.goal is None else "timed"
        yield f"{found.workload}: There is no table before {DDP_FP32} is {missing}."
        return
    seeds = len(found.curves[DDP_FP32])
    for rate in found.rates:
        lines = [
            f"{found.workload} at {rate_text(rate)}. The goal is a loss of {found.goal:.4f}: that of "
            f"{label(DDP_FP32)} after {found.steps:,} steps, plus two standard deviations of its {seeds} seeds. "
            f"That is {100 * (found.goal / found.dense_loss - 1):.1f} % above it.{_stricter(found, rate)}",
            "",
            "| | loss at the end | above DDP fp32, % | accuracy, % | steps to the goal | ms per step "
            "| minutes to the goal | × DDP fp32 | × fp16 hook |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for method in found.methods:
            if found.curves_at(method, rate):
                lines.append(f"| {_name(found, method, rate)} | {' | '.join(_cells(found, method, rate))} |")
        yield "\n".join(lines)


def _stricter(found: Findings, rate: str) -> str:
    """Which methods would reach a goal of one standard deviation less."""
    dense = list(found.curves[DDP_FP32].values())
    goal = goal_of(dense, deviations=1)
    there = [
        _name(found, method, rate) for method in found.methods
        if method != DDP_FP32 and (curves := found.curves_at(method, rate))
        and all(reached(curve, goal) is not None for curve in curves.values())
    ]  # fmt: skip
    return f" With one, all seeds reach it of: {', '.join(there) or 'none'}." if len(dense) > 1 else ""


def _cells(found: Findings, method: str, rate: str) -> Iterator[str]:
    assert found.goal is not None, "there is a goal"
    curves, dense = found.curves_at(method, rate), found.curves[DDP_FP32]
    accuracies = found.accuracies[found.trained(method, rate)]
    above = [100 * (curve[-1][1] / dense[seed][-1][1] - 1) for seed, curve in curves.items() if seed in dense]
    steps = [reached(curve, found.goal) for curve in curves.values()]
    there = [step for step in steps if step is not None]
    step_seconds = found.seconds_of(method, rate, found.steps)
    seconds = [each for each in found.seconds_to_goal(method, rate).values() if each is not None]
    yield plus_minus([curve[-1][1] for curve in curves.values()], "{:.4f}")
    yield "" if method == DDP_FP32 else plus_minus(above, "{:+.2f}")
    yield plus_minus([100 * each for each in accuracies.values()], "{:.2f}")
    if len(there) == len(steps):
        yield plus_minus([float(step) for step in there], "{:,.0f}")
    else:
        yield f"{len(there)} of {len(steps)} seeds" if there else "not reached"
    yield "not timed" if step_seconds is None else f"{1e3 * step_seconds / found.steps:,.0f}"
    yield plus_minus([each / 60 for each in seconds], "{:.1f}") if len(seconds) == len(steps) else ""
    for rival in (DDP_FP32, DDP_FP16):
        yield "1" if method == rival and there else plus_minus(found.speedups(method, rate, rival), "{:.2f}")


def plus_minus(values: Sequence[float], form: str) -> str:
    """Mean and half of its interval; empty for no values."""
    if not values:
        return ""
    mean, half = interval(values)
    return form.format(mean) + ("" if math.isnan(half) else " ± " + form.replace("+", "").format(half))


def _name(found: Findings, method: str, rate: str) -> str:
    if method not in found.plans:
        return label(method) if is_native(method) else f"`{method}`"
    trained = found.trained(method, rate)
    return f"`{method}`: {label(trained) if is_native(trained) else trained}"


# -- plots ---------------------------------------------------------------------------------------------------------


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Plot loss by time for each workload, and speed-ups in time to the goal for all."""
    complete = [found for found in read(rows) if found.goal is not None and found.rates]
    for found in complete:
        _plot_losses(found, folder / f"loss-by-time-{found.workload}.svg")
    if complete:
        _plot_speedups(complete, folder / "time-to-accuracy.svg")


def _short(method: str) -> str:
    return label(method).removeprefix("gradwire ")


def _style(found: Findings, method: str) -> dict[str, str]:
    if is_native(method):
        return {"color": DENSE, "linestyle": "-" if method == DDP_FP32 else "--"}
    place = [each for each in found.methods if not is_native(each)].index(method)
    return {"color": COLORS[place % len(COLORS)], "linestyle": "-" if place < len(COLORS) else "--"}


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of several trainings at each step that all have."""
    return [(points[0][0], statistics.fmean(loss for _, loss in points)) for points in zip(*curves)]


def _plot_losses(found: Findings, path: Path) -> None:
    assert found.goal is not None, "there is a goal"
    dense = mean_curve(list(found.curves[DDP_FP32].values()))
    with figure(path, columns=len(found.rates), size=(5.5 * len(found.rates), 5), sharey=True) as axes:
        for axis, rate in zip(axes[0], found.rates):
            for method in found.methods:
                curves = list(found.curves_at(method, rate).values())
                curve = mean_curve(curves)
                times = [found.seconds_to(method, rate, step) for step, _ in curve]
                minutes = [seconds / 60 for seconds in times if seconds is not None]
                if minutes and len(minutes) == len(curve):
                    style = _style(found, method)
                    axis.plot(minutes, [loss for _, loss in curve], label=_short(method), linewidth=1.4, **style)
                    step = reached(curve, found.goal)
                    if step is not None and all(reached(each, found.goal) is not None for each in curves):
                        at = [each for each, _ in curve].index(step)
                        axis.plot(minutes[at], curve[at][1], "o", color=style["color"], markersize=5)
            axis.axhline(found.goal, color="#c2324f", linewidth=0.8)
            axis.set(xscale="log", xlabel=f"minutes of steps at {rate_text(rate)} (logarithmic)")
            plain_numbers(axis.xaxis)
        lowest = min(curve[-1][1] for seeds in found.curves.values() for curve in seeds.values())
        # The beginning, where all methods are close together, is left out.
        axes[0][0].set_ylim(lowest - 0.05 * (dense[0][1] - lowest), dense[len(dense) // 5][1])
        axes[0][0].set_ylabel(f"validation loss of {found.workload}, smoothed; red: the goal")
        legend_below(axes[0][0], columns=6)


def _plot_speedups(complete: Sequence[Findings], path: Path) -> None:
    columns = max(len(found.rates) for found in complete)
    height = 1 + sum(0.27 * len(found.methods) + 0.6 for found in complete)
    with figure(path, rows=len(complete), columns=columns, size=(5.5 * columns, height)) as axes:
        for row, found in zip(axes, complete):
            for axis, rate in zip(row, found.rates):
                _draw_speedups(axis, found, rate)
            row[0].set_yticks(range(len(found.methods)), [_short(method) for method in found.methods])


def _draw_speedups(axis: Any, found: Findings, rate: str) -> None:
    """A bar for each method, or words where there is nothing to draw."""
    for place, method in enumerate(found.methods):
        speedups = found.speedups(method, rate, DDP_FP32)
        mean, half = interval(speedups)
        if speedups:
            error = {"xerr": min(half, mean), "error_kw": {"ecolor": FAINT}} if len(speedups) > 1 else {}
            axis.barh(place, mean, 0.7, color=_style(found, method)["color"], **error)
        curves = found.curves_at(method, rate)
        text = f"{mean:.1f}" if speedups else "not reached by all seeds" if curves else "not trained"
        axis.text((mean + (0 if math.isnan(half) else half)) if speedups else 0, place, f" {text}", va="center", size=9)
    axis.axvline(1, color=FAINT, linewidth=0.8, zorder=0)
    axis.set_yticks([])
    axis.set_ylim(len(found.methods) - 0.4, -0.6)
    axis.margins(x=0.15)
    axis.set(xlabel=f"{found.workload} at {rate_text(rate)}: × DDP fp32 in time to the goal")
