"""What the trainings of sparsifiers share: `extreme_classification` and `vision`.

Accuracy by step is measured in whole trainings, one a seed, on links as they are: a rate does not change what is
learnt. Step times are measured in short trainings of the same model in the lab, at each rate. Both together are
accuracy by time.
Every training is a cell of its own, kept in a folder: what has been run is not run again.
"""
# Shapes: W = ranks

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.bench.records import write_figures
from gradwire.bench.statistics import interval
from gradwire.bench.training import TrainingOptions, run

RANKS = 4
RATES = ("100mbit", "1gbit")
PARTS = ("learn", "time")
SEEDS = 3
MORE_COLUMNS = ("seed", "step")
GOAL = 0.97  # of the dense training's last accuracy: what a method is to reach
EVERY = 10  # steps between the points of a loss curve that are written down
COLOURS = ("#3e4c59", "#17a08a", "#2f6db5", "#b3590f", "#8a4fbf", "#c2324f")
Cells = dict[str, dict[str, Any]]
"""What was measured, by label and part, of which there is one ``learn-0``, ``learn-1``… for each seed."""


@dataclass(frozen=True)
class Design:
    """One way to synchronise gradients.

    Attributes:
        label: for readers.
        method: as `gradwire.bench.methods` takes it; ``{warmup}`` is where the option of that name stands.
    """

    label: str
    method: str

    def learnt(self, steps: int) -> str:
        """The method in a training of so many steps, of which a quarter warm up."""
        return self.method.format(warmup=f":warmup={steps // 4}")

    @property
    def timed(self) -> str:
        """The method once it is warm."""
        return self.method.format(warmup="")


@dataclass(frozen=True)
class Study:
    """One workload and what is compared on it.

    Attributes:
        name: of the benchmark and its file.
        workload: its class, as `gradwire.bench.workload.make_workload` takes it.
        measure: what accuracy is.
        designs: the first is the one all others are compared with.
        steps: of a whole training.
        validate_every: steps between the points of an accuracy curve.
    """

    name: str
    workload: str
    measure: str
    designs: tuple[Design, ...]
    steps: int
    validate_every: int

    @property
    def results(self) -> Path:
        """The file of its figures."""
        return Path(f"benchmarks/results/{self.name}.csv")


def learn(study: Study, design: Design, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """A whole training: losses, and accuracy along it."""
    options = {"rates": (None,), "timed_seconds": 0.1, "buckets_mb": (25.0,), "lab": False, "seed": seed}
    result = _run(study, design.learnt(arguments.steps), arguments, steps=arguments.steps,
                  validate_every=study.validate_every, **options)  # fmt: skip
    entry = result.results[0]
    return {
        "parameters": result.num_parameters, "losses": entry.losses, "validations": entry.validations,
        "identical": entry.identical,
    }  # fmt: skip


def time(study: Study, design: Design, arguments: argparse.Namespace) -> dict[str, Any]:
    """A short training at each rate: what a step takes."""
    options = {"rates": RATES, "timed_seconds": arguments.seconds, "buckets_mb": (4.0, 25.0), "lab": True}
    result = _run(study, design.timed, arguments, steps=3, **options)
    found = {
        time.rate: {
            "step": time.step.median, "p20": time.step.p20, "p80": time.step.p80, "samples": time.step.size,
            "step_without_communication": time.compute, "ideal_step": time.ideal, "bytes": time.bytes,
            "encode": time.split.encode, "decode": time.split.decode,
        }
        for time in result.results[0].times
    }  # fmt: skip
    return {"parameters": result.num_parameters, "rates": found}


def _run(study: Study, method: str, arguments: argparse.Namespace, **options: Any) -> Any:
    return run(
        TrainingOptions(
            workload=f"{study.workload}={arguments.data.resolve()}", methods=(method,), ranks=RANKS,
            deadline_seconds=3600.0, **options,
        )
    )  # fmt: skip


def parts(arguments: argparse.Namespace) -> list[str]:
    """The cells of a design: trainings of the seeds that are wanted, and times."""
    learnt = [f"learn-{seed}" for seed in range(arguments.seeds)]
    return (learnt if "learn" in arguments.parts else []) + (["time"] if "time" in arguments.parts else [])


def measure(study: Study, arguments: argparse.Namespace) -> Cells:
    """Run what has not been run; returns all cells that there are."""
    arguments.cells.mkdir(parents=True, exist_ok=True)
    for part in parts(arguments):
        for design in study.designs:
            path = arguments.cells / f"{design.label}-{part}.json"
            if path.exists() or design.label not in arguments.designs:
                continue
            kind, _, seed = part.partition("-")
            found = learn(study, design, arguments, int(seed)) if kind == "learn" else time(study, design, arguments)
            path.write_text(json.dumps(found))
            print(f"{design.label}: {part} done", flush=True)
    return {path.stem: json.loads(path.read_text()) for path in sorted(arguments.cells.glob("*.json"))}


def figures(study: Study, cells: Cells, seeds: int = SEEDS) -> Iterator[dict[str, Any]]:
    """One figure a line."""
    for design in study.designs:
        timed = cells[f"{design.label}-time"]
        fixed = {"method": design.label, "ranks": RANKS, "size": timed["parameters"], "dtype": "float32",
                 "source": "measured"}  # fmt: skip
        for seed in range(seeds):
            learnt, of_seed = cells[f"{design.label}-learn-{seed}"], {**fixed, "seed": seed}
            for step, loss, accuracy in learnt["validations"]:
                yield {**of_seed, "metric": "accuracy", "value": accuracy, "unit": "share", "step": step}
                yield {**of_seed, "metric": "validation_loss", "value": loss, "unit": "nats", "step": step}
            for at in range(0, len(learnt["losses"]) - EVERY + 1, EVERY):
                mean = statistics.fmean(learnt["losses"][at : at + EVERY])
                yield {**of_seed, "metric": "training_loss", "value": mean, "unit": "nats", "step": at + EVERY}
        for rate, found in timed["rates"].items():
            here = {**fixed, "rate": rate}
            spread = {key: found[key] for key in ("p20", "p80", "samples")}
            yield {**here, "metric": "step", "value": found["step"], "unit": "s", **spread}
            for metric in ("step_without_communication", "ideal_step", "encode", "decode"):
                yield {**here, "metric": metric, "value": found[metric], "unit": "s"}
            yield {**here, "metric": "bytes", "value": found["bytes"], "unit": "B"}


# -- tables and plots ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """One design, as read back.

    Attributes:
        seeds: accuracy at the end, of each seed.
        accuracy: by step, the mean of all seeds.
        steps: seconds of a step by rate.
        ideal: seconds of the ideal step by rate.
        megabytes: that a rank sends a step, at the first rate.
    """

    label: str
    seeds: tuple[float, ...]
    accuracy: dict[int, float]
    steps: dict[str, float]
    ideal: dict[str, float]
    megabytes: float

    @property
    def last(self) -> float:
        """Accuracy at the end, the mean of all seeds."""
        return statistics.fmean(self.seeds)

    def reaches(self, accuracy: float) -> int | None:
        """The first step from which on the mean is at least so accurate; None for never."""
        found = None
        for step in sorted(self.accuracy, reverse=True):
            if self.accuracy[step] < accuracy:
                break
            found = step
        return found


def read(path: Path, study: Study) -> list[Found]:
    """The figures of a file."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = []
    for design in study.designs:
        mine = [row for row in rows if row["method"] == design.label]
        by_step: dict[int, list[float]] = {}
        for row in mine:
            if row["metric"] == "accuracy":
                by_step.setdefault(int(row["step"]), []).append(float(row["value"]))

        def by_rate(metric: str, mine: Sequence[Mapping[str, str]] = mine) -> dict[str, float]:
            return {row["rate"]: float(row["value"]) for row in mine if row["metric"] == metric}

        means = {step: statistics.fmean(values) for step, values in by_step.items()}
        megabytes = by_rate("bytes")[RATES[0]] / 1e6
        last = tuple(by_step[max(by_step)])
        found.append(Found(design.label, last, means, by_rate("step"), by_rate("ideal_step"), megabytes))
    return found


def table(study: Study, found: Sequence[Found]) -> str:
    """Accuracy with its difference from the first design's, seed by seed, and speed, in Markdown."""
    dense = found[0]
    goal = GOAL * dense.last
    rates = " | ".join(f"{rate}: step, × dense, ÷ ideal, × dense to {goal:.1%}" for rate in RATES)
    lines = [
        f"| | {study.measure} | points above {dense.label} | steps to {goal:.1%} | MB a step | {rates} |",
        "|---|---|---|---|---|" + "---|" * len(RATES),
    ]
    for each in found:
        reached, first = each.reaches(goal), dense.reaches(goal)
        cells = []
        for rate in RATES:
            faster = dense.steps[rate] / each.steps[rate]
            sooner = "never" if reached is None or first is None else f"{faster * first / reached:.2f}"
            over = each.steps[rate] / each.ideal[rate]
            cells.append(f"{1e3 * each.steps[rate]:,.0f} ms, {faster:.2f}, {over:.2f}, {sooner}")
        mean, half = interval([100 * (a - b) for a, b in zip(each.seeds, dense.seeds)])
        apart = "" if each is dense else f"{mean:+.1f}" + ("" if math.isnan(half) else f" ± {half:.1f}")
        lines.append(
            f"| {each.label} | {each.last:.1%} | {apart} | {reached or 'never'} | {each.megabytes:.3g} | "
            f"{' | '.join(cells)} |"
        )
    return "\n".join(lines)


def plot(study: Study, found: Sequence[Found], path: Path) -> None:
    """Accuracy by step, steps a second at each rate, and accuracy by time at each rate."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, (by_step, speed, *by_time) = pyplot.subplots(1, 2 + len(RATES), figsize=(18, 4.2), layout="constrained")
    width = 0.8 / len(found)
    for index, (each, colour) in enumerate(zip(found, COLOURS)):
        steps = sorted(each.accuracy)
        values = [100 * each.accuracy[step] for step in steps]
        by_step.plot(steps, values, color=colour, label=each.label)
        places = [place + (index - (len(found) - 1) / 2) * width for place in range(len(RATES))]
        speed.bar(places, [1 / each.steps[rate] for rate in RATES], width, color=colour)
        for axes, rate in zip(by_time, RATES):
            axes.plot([step * each.steps[rate] for step in steps], values, color=colour)
    by_step.set(xlabel="step", ylabel=f"{study.measure}, %")
    by_step.legend(frameon=False, fontsize=8)
    speed.set(yscale="log", ylabel="steps a second (logarithmic)")
    speed.set_xticks(range(len(RATES)), RATES)
    speed.set_yticks([0.2, 0.5, 1, 2, 5, 10], ["0.2", "0.5", "1", "2", "5", "10"])
    speed.set_yticks([], minor=True)
    for axes, rate in zip(by_time, RATES):
        axes.set(xscale="log", xlabel=f"seconds of training at {rate} (logarithmic)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main(study: Study, description: str, argv: Sequence[str] | None = None) -> None:
    """The command line of a study."""
    labels = [design.label for design in study.designs]
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data")
    parser.add_argument("--steps", type=int, default=study.steps, help="of a whole training")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="whole trainings of each design")
    parser.add_argument("--seconds", type=float, default=5.0, help="for which steps are timed at each rate")
    parser.add_argument("--designs", nargs="*", default=labels, choices=labels)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--cells", type=Path, default=Path(tempfile.gettempdir()) / f"gradwire-{study.name}",
                        help="folder of what has been measured already; delete it to begin anew")  # fmt: skip
    parser.add_argument("--csv", type=Path, default=study.results)
    parser.add_argument("--out", type=Path, help="folder for the plot")
    parser.add_argument("--plot-only", action="store_true", help="run nothing, and read the figures from --csv")
    arguments = parser.parse_args(argv)
    if not arguments.plot_only:
        if arguments.data is None:
            parser.error("Expected --data.")
        cells = measure(study, arguments)
        arguments.parts = PARTS
        missing = [f"{label}-{part}" for label in labels for part in parts(arguments)
                   if f"{label}-{part}" not in cells]  # fmt: skip
        if missing:
            print(f"No figures are written before {', '.join(missing)} are there.")
            return
        write_figures(study.name, figures(study, cells, arguments.seeds), arguments.csv, more_columns=MORE_COLUMNS)
    found = read(arguments.csv, study)
    print(table(study, found))
    if arguments.out:
        plot(study, found, arguments.out / f"{study.name}.svg")
        print(f"Plot: {(arguments.out / f'{study.name}.svg').resolve()}")
