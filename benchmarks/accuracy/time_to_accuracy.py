"""Whole trainings, and the time that each method needs to the accuracy of DDP fp32.

The record has two kinds of parts, which `--parts` chooses:

    time     step times of all methods at each rate, in the lab, in the replay of one recorded backward pass
    learn    whole trainings with four real ranks, on links as they are, since the rate does not affect what is learned

Both together yield loss by time. A training is written as soon as it ends, and is not repeated, so that the command may
be stopped and started again at any time. `--minutes` starts no further part after that time. Losses do not depend on
what else the machine does; step times do.

`auto` is timed first. What it settles on at each rate, a plan or one of DDP's own methods, is part of the record and is
then trained like any other method. If that is a method that is trained anyway, or the plan of another rate, there is no
further training.

`benchmarks.accuracy.compared` has the options that the papers ask for. During a warm-up, more is sent, so the ratios of
the warm-up are timed, too, and each step counts with the time of its ratio. `benchmarks.accuracy.summary` defines the
goal.

The workloads are `small` and `text`, which every machine has, and `vision`, a ResNet on CIFAR-10, for which `--data` is
a folder as in `benchmarks.data.cifar`.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 5.2: losses and times from separate runs. Differences: one length
of training, since rates of learning decay to its end; the goal is a loss instead of an accuracy.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.accuracy import summary
from benchmarks.accuracy.compared import METHODS, Row, method_of, phases, settled, trained_as
from benchmarks.keys import key_of
from benchmarks.options import Seconds, Seeds, choose, listed
from gradwire.bench import job
from gradwire.bench import methods as bench_methods
from gradwire.bench.job import BenchmarkJob, Message, Segment
from gradwire.bench.launch import RanksError, launch
from gradwire.bench.results import StepTime
from gradwire.bench.statistics import across_ranks
from gradwire.bench.training import TrainingOptions
from gradwire.bench.workloads import make_workload
from gradwire.core.errors import OptionError

NAME = "time-to-accuracy"
RANKS = 4
RATES = ("100mbit", "1gbit")
PARTS = ("time", "learn")
KEY, CHOICES = ("workload", "method", "seed", "steps"), ("workloads", "methods", "seeds", "parts", "minutes")
WORKLOADS = {
    "small": "small",
    "text": f"benchmarks.accuracy.text.SmallBatches={sysconfig.get_paths()['stdlib']}",
    "vision": "benchmarks.accuracy.vision.SmallCifar10",
}
NEEDS_DATA = {"vision"}
BUCKETS_MB = (4.0, 1.0, 25.0)


@dataclass(frozen=True)
class Task:
    """A workload.

    Attributes:
        name: Name in the record.
        made_by: Name for `make_workload`.
        num_parameters: Number of parameters of the model.
        has_momentum: Whether its optimizer has momentum.
    """

    name: str
    made_by: str
    num_parameters: int
    has_momentum: bool

    @classmethod
    def of(cls, name: str, data: Path | None, workloads: Mapping[str, str] = WORKLOADS) -> Task:
        """The workload with a name, one of `workloads` or of `gradwire bench`."""
        made_by = workloads.get(name, name)
        if name in NEEDS_DATA:
            if data is None:
                raise OptionError(f"The workload {name} trains on images. Pass --data FOLDER with those of CIFAR-10.")
            made_by = f"{made_by}={data.resolve()}"
        workload = make_workload(made_by)  # decodes images once, before all ranks would
        model = workload.model()
        groups = workload.optimizer(model).param_groups
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        return cls(name, made_by, num_parameters, any(group.get("momentum") for group in groups))

    def method(self, label: str, steps: int) -> str:
        """The method of one of `METHODS`, or of `gradwire.bench.methods`, for a training of `steps` steps."""
        return method_of(label, steps, self.has_momentum)


# -- step times ----------------------------------------------------------------------------------------------------


def time_methods(task: Task, timed: Sequence[str], seconds: float, lab: bool | None) -> Iterator[list[Row]]:
    """Time the steps of methods at each rate, all in the replay of the same recording."""
    from gradwire.cli.bench import run_with_bars

    result = run_with_bars(
        TrainingOptions(
            workload=task.made_by, methods=timed, ranks=RANKS, rates=RATES, steps=0, timed_seconds=seconds,
            buckets_mb=BUCKETS_MB, lab=lab, deadline_seconds=3600.0, replay=True,
        )
    )  # fmt: skip
    for entry in result.results:
        yield [{**_fixed(task), "method": entry.method, **row} for each in entry.times for row in step_figures(each)]


def step_figures(time: StepTime) -> Iterator[Row]:
    """Rows of one method at one rate."""
    step, source = time.step, "measured" if time.measured else "predicted"
    spread = {"value": step.median, "p20": step.p20, "p80": step.p80, "samples": step.size}
    yield {"rate": time.rate, "metric": "step", "unit": "s", "source": source, "bucket_mb": time.bucket_mb, **spread}
    yield {"rate": time.rate, "metric": "step_without_communication", "unit": "s", "value": time.compute}
    yield {"rate": time.rate, "metric": "ideal_step", "unit": "s", "value": time.ideal}
    yield {"rate": time.rate, "metric": "bytes", "unit": "B", "value": time.bytes}
    if time.settled is not None:
        yield {"rate": time.rate, "metric": "settled", "plan": " ".join(time.settled.split())}
        yield {"rate": time.rate, "metric": "settling", "unit": "s", "value": time.settling}


def _fixed(task: Task) -> Row:
    return {
        "workload": task.name, "ranks": RANKS, "size": task.num_parameters, "dtype": "float32", "source": "measured",
    }  # fmt: skip


# -- trainings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        task: Workload.
        method: Method, as the record names it.
        seed: Seed of model and data.
        plan: Plan as JSON, if the method is one.
    """

    task: Task
    method: str
    seed: int
    plan: str = ""

    def key(self, steps: int) -> tuple[str, ...]:
        """Key in the record."""
        return key_of({"workload": self.task.name, "method": self.method, "seed": self.seed, "steps": steps}, KEY)

    def run(self, steps: int, every: int, progress: Progress) -> list[Row]:
        """Train, and return the rows."""
        bar = progress.add_task(f"{self.task.name}, {self.method}, seed {self.seed}", total=steps)

        def on_message(message: Message) -> None:
            if isinstance(message, job.Progress):
                progress.update(bar, completed=message.step)

        with tempfile.TemporaryDirectory() as folder:
            method = self.method
            if self.plan:
                path = Path(folder) / "plan.json"
                path.write_text(self.plan)
                method = f"{bench_methods.PLAN}:{path}"
            segment = Segment(method, train_steps=steps, validate_every=every, min_timed=0)
            work = BenchmarkJob(
                self.task.made_by, (segment,), folder="", seed=self.seed, deadline_seconds=600.0 + 10.0 * steps
            )
            started = time.monotonic()
            outcomes = launch(work, RANKS, on_message)
        progress.remove_task(bar)
        if not all(outcome.identical for outcome in outcomes):
            raise RanksError(f"After {steps} steps with {self.method}, ranks have different parameters.")
        losses = across_ranks([outcome.losses for outcome in outcomes])
        fixed = {**_fixed(self.task), "method": self.method, "seed": self.seed, "steps": steps}
        seconds = time.monotonic() - started
        sent = statistics.fmean(outcome.train_bytes for outcome in outcomes)
        return [
            {**fixed, "metric": "training_time", "value": seconds, "unit": "s", "step": steps},
            {**fixed, "metric": "training_bytes", "value": sent / steps, "unit": "B", "step": steps},
            *({**fixed, **row} for row in curve_figures(losses, outcomes[0].validations)),
        ]


def curve_figures(losses: Sequence[float], validations: Sequence[tuple[int, float, float]]) -> Iterator[Row]:
    """A row for each validation, with the mean of the training losses since the one before."""
    before = 0
    for step, loss, accuracy in validations:
        training = statistics.fmean(losses[before:step])
        yield {
            "metric": "validation_loss", "value": loss, "unit": "nats", "step": step, "accuracy": accuracy,
            "training_loss": training,
        }  # fmt: skip
        before = step


def trainings(
    tasks: Sequence[Task], labels: Sequence[str], seeds: int, steps: int, rows: Sequence[Row]
) -> list[Training]:
    """All trainings, in order: one seed of all methods after another."""
    found: dict[tuple[str, ...], Training] = {}
    for seed in range(seeds):
        for task in tasks:
            for method in (task.method(label, steps) for label in labels):
                # What auto settled on, or the method itself.
                named = {trained_as(plan): plan for plan in settled(rows, task.name, method).values()}
                for name, plan in ({method: ""} if not bench_methods.is_auto(method) else named).items():
                    training = Training(task, name, seed, "" if name == plan else plan)
                    found.setdefault(training.key(steps), training)
    return list(found.values())


def seconds_left(todo: Sequence[Training], rows: Sequence[Row], steps: int) -> float:
    """About how long trainings will take, by those of the same workload, of which there is at least one of any."""
    known: dict[str, list[float]] = {}
    for row in rows:
        if row["metric"] == "training_time" and row["steps"] == steps:
            known.setdefault(row["workload"], []).append(row["value"])
    usual = [statistics.fmean(itertools.chain(*known.values()))]
    return sum(statistics.fmean(known.get(each.task.name, usual)) for each in todo)


# -- the benchmark -------------------------------------------------------------------------------------------------


def run(
    data: Annotated[Path | None, typer.Option(help="Folder or tar of CIFAR-10 as images, for vision.")] = None,
    workloads: Annotated[str, typer.Option(help="small, text, vision, or one of gradwire bench.")] = "",
    methods: Annotated[str, typer.Option(help="Of the table, or others such as onebit/momentum.")] = "",
    seeds: Seeds = 3,
    parts: Annotated[str, typer.Option(help="time, learn, or both.")] = "",
    minutes: Annotated[float, typer.Option(help="Minutes after which no further part starts.")] = math.inf,
    steps: Annotated[int, typer.Option(help="Steps of a training.")] = 3000,
    every: Annotated[int, typer.Option(help="Steps between validations.")] = 50,
    seconds: Seconds = 5.0,
    loopback: Annotated[bool, typer.Option("--loopback", help="Predict step times instead of shaping links.")] = False,
    *,
    done: Set[tuple[str, ...]],
    recorded: Sequence[Row],
) -> Iterator[list[Row]]:
    """Train what the record does not have. If it lacks step times of one method, time all methods of the workload."""
    labels, kinds, end = listed(methods, tuple(METHODS)), choose(parts, PARTS), time.monotonic() + 60 * minutes
    tasks = [Task.of(name, data) for name in listed(workloads, tuple(WORKLOADS))]
    rows = list(recorded)
    for task in tasks if "time" in kinds else ():
        known = [row["method"] for row in rows if row["workload"] == task.name and row["metric"] == "step"]
        wanted = [each for label in labels for _, each in phases(task.method(label, steps), steps)]
        is_missing = any(key_of({"workload": task.name, "method": each}, KEY) not in done for each in wanted)
        if is_missing and time.monotonic() < end:
            # All of them: ratios of times from two recordings, or from two machines, would mean nothing.
            for part in time_methods(task, list(dict.fromkeys([*known, *wanted])), seconds, not loopback):
                rows += part
                yield part
    if "learn" not in kinds:
        return
    for task in tasks:
        for method in dict.fromkeys(task.method(label, steps) for label in labels):
            if bench_methods.is_auto(method) and not settled(rows, task.name, method):
                print(f"{task.name}: {method} is trained once its steps are timed, which --parts time does.")
    todo = [each for each in trainings(tasks, labels, seeds, steps, rows) if each.key(steps) not in done]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for index, training in enumerate(todo, start=1):
            if time.monotonic() >= end:
                break
            part = training.run(steps, every, progress)
            rows += part
            yield part
            left = seconds_left(todo[index:], rows, steps)
            progress.console.print(
                f"{training.task.name}, {training.method}, seed {training.seed}: loss {part[-1]['value']:.4f} in "
                f"{part[0]['value'] / 60:.1f} min. {len(todo) - index} left, about {left / 3600:.1f} h."
            )


def table(rows: Sequence[Row]) -> str:
    """See `summary.table`."""
    return summary.table(rows)


def plot(rows: Sequence[Row], folder: Path) -> None:
    """See `summary.plot`."""
    summary.plot(rows, folder)
