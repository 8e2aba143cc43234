"""THC in the lab: shares of a round's time, step times, and time to accuracy (its figures 2a and 5 to 8).

Four ranks and the aggregator have a host each, with links of 100 Mb/s or 1 Gb/s in both directions:

    rounds   all gradients of a model at once, and nothing else: seconds in the worker's codec, in the server's, and the
             rest, which is the wire and waiting; and the bytes of a rank's interface in both directions
    steps    a recorded backward pass replayed as waits, while gradients are synchronized
    learn    real trainings on links as they are, with validations. Together with step times: time to accuracy

The goal of a training is 97 % of the accuracy that DDP with the same seed has after 120 steps. All train for twice as
many steps. QSGD sends fewer bytes than THC with 4 bits, and more with 8 (`benchmarks.papers.thc.scale` has the same
bytes).

Without a stand-alone server, ranks serve each other, and the server's share is what they merge. With the aggregator it
is that of its process, on a processor that all hosts share.

Source: THC (Li et al. 2024), sections 2 and 8. Differences: a small transformer on two cores instead of GPUs, 4 ranks,
no RDMA and no switch; ring all-reduce of Gloo instead of NCCL.
"""
# Shapes: W = ranks

from __future__ import annotations

import json
import secrets
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import ranks as processes
from benchmarks.intervals import interval
from benchmarks.keys import key_of
from benchmarks.options import Rates, Seconds, Seeds, choose, listed
from benchmarks.papers.thc.lab_ends import BUCKET_MB, PORT
from gradwire.bench.job import BenchmarkJob, Message, Progress, Segment
from gradwire.bench.launch import ServerProcess, launch
from gradwire.bench.methods import DDP_FP32, is_native, label, strategy
from gradwire.bench.training import TrainingOptions
from gradwire.bench.training import run as train
from gradwire.bench.workloads import make_workload

RANKS = 4
RATES = ("100mbit", "1gbit")
METHODS = (
    DDP_FP32, "thc@server", "thc@scatter_reduce", "topk:ratio=0.1", "dgc:ratio=0.1/momentum", "qsgd:bits=4",
    "qsgd:bits=8", "terngrad",
)  # fmt: skip
PARTS = ("rounds", "steps", "learn")
GOAL, GOAL_STEP = 0.97, 120  # of DDP's accuracy after these steps
KEY, CHOICES = ("part", "method", "rate", "seed"), ("parts", "rates", "methods", "seeds")
Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """Options; see `run`, and `benchmarks.papers.thc.lab_ends.SERVERS` for `server`.

    `link` is the rate of the server's link over that of the ranks.
    """

    rates: list[str]
    methods: list[str]
    workload: str
    seconds: float
    steps: int
    every: int
    deadline: float
    loopback: bool = False
    server: str = "tcp"
    link: float = 1.0


def server_process(folder: str, asked: Asked, sessions: int) -> ServerProcess:
    """Aggregator process for `sessions` consecutive methods."""
    report = str(Path(folder) / "server")
    arguments = asked.server, sessions, "{host}", RANKS, report
    command = processes.command("benchmarks.papers.thc.lab_ends", "serve", *arguments)
    key = secrets.token_hex(32)  # of this run alone
    variables = {"GRADWIRE_AGGREGATOR": f"{{host}}:{PORT}", "GRADWIRE_JOB_KEY": key}
    return ServerProcess(command, variables, asked.link)


def served(methods: Sequence[str]) -> int:
    """Number of methods that need the aggregator."""
    return sum(not is_native(method) and strategy(method) == "server" for method in methods)


# -- rounds ------------------------------------------------------------------------------------------------------------


def measure_rounds(asked: Asked) -> Iterator[Row]:
    """Measure round times and bytes of each method at each rate."""
    segments = tuple(
        Segment(method, BUCKET_MB, timed_seconds=asked.seconds, rates=(rate,))
        for method in asked.methods
        for rate in asked.rates
    )
    said: dict[int, list[Row]] = {}

    def hear(message: Message) -> None:
        if isinstance(message, Progress) and message.phase.startswith("{"):
            said.setdefault(message.segment, []).append(json.loads(message.phase))

    with tempfile.TemporaryDirectory() as folder:
        needed = served([segment.method for segment in segments])
        server = server_process(folder, asked, needed)
        job = BenchmarkJob(asked.workload, segments, folder="", deadline_seconds=asked.deadline, replay=True)
        launch(job, RANKS, hear, lab=not asked.loopback, module="benchmarks.papers.thc.lab_ends", server=server)
        report = Path(folder) / "server"
        spent = [float(line) for line in report.read_text().split()] if needed else []
    numel = sum(parameter.numel() for parameter in make_workload(asked.workload).model().parameters())
    for index, segment in enumerate(segments):
        here = {"part": "rounds", "method": segment.method, "rate": segment.rates[0], "size": numel, "unit": "s"}
        server_seconds = spent.pop(0) if served([segment.method]) else None
        yield from (here | row for row in round_figures(said[index], server_seconds, numel))


def round_figures(ranks: Sequence[Row], server_seconds: float | None, numel: int) -> Iterator[Row]:
    """One method at one rate.

    Args:
        ranks: Messages of the ranks.
        server_seconds: Time of the aggregator in all rounds, if there is one.
        numel: Elements of the model.
    """
    count = len(ranks[0]["seconds"])
    longest = [max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    total = statistics.median(longest)
    worker = statistics.fmean(rank["worker"] for rank in ranks) / count
    merging = statistics.fmean(rank["server"] for rank in ranks) / count
    server = merging if server_seconds is None else server_seconds / ranks[0]["rounds"]
    yield {"metric": "round", "value": total, "samples": count}
    yield {"metric": "round_worker", "value": worker}
    yield {"metric": "round_server", "value": server}
    yield {"metric": "round_wire", "value": total - worker - server}
    if "sent" in ranks[0]:
        for metric, way in (("bytes_there", "sent"), ("bytes_back", "received")):
            nbytes = statistics.fmean(rank[way] for rank in ranks) / count
            yield {"metric": metric, "value": nbytes, "unit": "B"}
            yield {"metric": f"{metric}_an_element", "value": nbytes / numel, "unit": "B"}


# -- steps, learning ---------------------------------------------------------------------------------------------------


def measure_steps(asked: Asked) -> Iterator[Row]:
    """Measure step times with a replayed backward pass."""
    options = TrainingOptions(
        workload=asked.workload, methods=tuple(asked.methods), ranks=RANKS, rates=tuple(asked.rates), steps=0,
        timed_seconds=asked.seconds, buckets_mb=(BUCKET_MB,), lab=not asked.loopback,
        deadline_seconds=asked.deadline, replay=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result = train(options, server=server_process(folder, asked, served(asked.methods)))
    for entry in result.results:
        for time in entry.times:
            here = {"part": "steps", "method": entry.method, "rate": time.rate, "size": result.num_parameters}
            step = time.step
            spread = {"value": step.median, "p20": step.p20, "p80": step.p80, "samples": step.size}
            yield {**here, "metric": "step", "unit": "s", **spread}
            yield {**here, "metric": "step_without_communication", "unit": "s", "value": time.compute}


def measure_learning(asked: Asked, seed: int) -> Iterator[Row]:
    """Measure accuracy during a training."""
    options = TrainingOptions(
        workload=asked.workload, methods=tuple(asked.methods), ranks=RANKS, rates=(None,), steps=asked.steps,
        validate_every=asked.every, timed_seconds=0.1, buckets_mb=(BUCKET_MB,), seed=seed, lab=False,
        deadline_seconds=asked.deadline,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result = train(options, server=server_process(folder, asked, served(asked.methods)))
    for entry in result.results:
        here = {"part": "learn", "method": entry.method, "rate": "none", "size": result.num_parameters, "seed": seed}
        for step, loss, accuracy in entry.validations:
            yield {**here, "metric": "validation_loss", "unit": "nats", "value": loss, "step": step}
            yield {**here, "metric": "validation_accuracy", "unit": "fraction", "value": accuracy, "step": step}


# -- tables ------------------------------------------------------------------------------------------------------------


def find(rows: Sequence[Row], metric: str, method: str, rate: str) -> list[Row]:
    """The figures of one metric."""
    wanted = {"metric": metric, "method": method, "rate": rate}
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def accuracies(rows: Sequence[Row], method: str) -> dict[int, dict[int, float]]:
    """Accuracies by step, of each seed."""
    found: dict[int, dict[int, float]] = {}
    for row in find(rows, "validation_accuracy", method, "none"):
        found.setdefault(int(row["seed"]), {})[int(row["step"])] = float(row["value"])
    return found


def steps_to_goal(rows: Sequence[Row], method: str) -> list[int | None]:
    """First validated step that reaches the goal, by seed; None where none does."""
    base = accuracies(rows, DDP_FP32)
    goals = {
        seed: GOAL * known[max((step for step in known if step <= GOAL_STEP), default=min(known))]
        for seed, known in base.items()
    }
    return [
        min((step for step, value in known.items() if value >= goals[seed]), default=None)
        for seed, known in accuracies(rows, method).items()
        if seed in goals
    ]


def table_of(rows: Sequence[Row], rate: str) -> str:
    """Markdown table of the figures at one rate."""
    lines = [
        "| method | round, ms | worker | server | wire | there, B | back, B | step, ms | steps to goal | s to goal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for method in _methods(rows):
        cells = [_cell(rows, metric, method, rate, 1e3, "{:.1f}") for metric in
                 ("round", "round_worker", "round_server", "round_wire")]  # fmt: skip
        cells += [_cell(rows, f"bytes_{way}_an_element", method, rate, 1, "{:.2f}") for way in ("there", "back")]
        cells.append(_cell(rows, "step", method, rate, 1e3, "{:.0f}"))
        counts, step = steps_to_goal(rows, method), find(rows, "step", method, rate)
        reached = [count for count in counts if count is not None]
        everywhere = bool(reached) and len(reached) == len(counts)
        steps = f"{statistics.fmean(reached):.0f}" if everywhere else f"{len(reached)} of {len(counts)} get there"
        cells.append(steps if counts else "–")
        cells.append(f"{statistics.fmean(reached) * float(step[0]['value']):.1f}" if everywhere and step else "–")
        lines.append(f"| {label(method)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_learning(rows: Sequence[Row]) -> str:
    """Markdown table of steps to the goal of all seeds, and of the last accuracy."""
    lines = ["| method | steps to goal, by seed | accuracy at the end, % | minus DDP's, points |", "|---|---|---|---|"]
    base = {seed: known[max(known)] for seed, known in accuracies(rows, DDP_FP32).items()}
    for method in _methods(rows):
        last = {seed: known[max(known)] for seed, known in accuracies(rows, method).items()}
        if last:
            steps = ", ".join("–" if count is None else str(count) for count in steps_to_goal(rows, method))
            mean, half = interval([100 * (last[seed] - base[seed]) for seed in last.keys() & base.keys()])
            cells = label(method), steps, f"{100 * statistics.fmean(last.values()):.1f}", f"{mean:+.1f} ± {half:.1f}"
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _methods(rows: Sequence[Row]) -> list[str]:
    return sorted(dict.fromkeys(row["method"] for row in rows), key=_place)


def _cell(rows: Sequence[Row], metric: str, method: str, rate: str, factor: float, form: str) -> str:
    found = find(rows, metric, method, rate)
    return form.format(factor * float(found[0]["value"])) if found else "–"


def _place(method: str) -> int:
    return METHODS.index(method) if method in METHODS else len(METHODS)


def table(rows: Sequence[Row]) -> str:
    """Tables of the figures at each rate, and of what was learned."""
    rates = sorted({row["rate"] for row in rows} - {"none"})
    return "\n\n".join([*(f"{rate}\n{table_of(rows, rate)}" for rate in rates), table_of_learning(rows)])


def run(
    parts: Annotated[str, typer.Option(help="rounds, steps, learn, or several.")] = "",
    rates: Rates = "",
    methods: Annotated[str, typer.Option(help="Methods, as `gradwire bench training` takes them.")] = "",
    workload: Annotated[str, typer.Option(help="What the ranks train.")] = "text",
    seconds: Seconds = 4.0,
    seeds: Seeds = 3,
    steps: Annotated[int, typer.Option(help="Steps of a training.")] = 2 * GOAL_STEP,
    every: Annotated[int, typer.Option(help="Steps after which it is validated.")] = 8,
    deadline: Annotated[float, typer.Option(help="Seconds after which a part fails.")] = 1200.0,
    loopback: Annotated[bool, typer.Option("--loopback", help="Without the lab: to see that it runs.")] = False,
    *,
    done: AbstractSet[tuple[str, ...]] = frozenset(),
) -> Iterator[list[Row]]:
    """Run all parts. Rounds and steps of a method are measured together at all rates, and trainings one by one."""
    asked = Asked(
        listed(rates, RATES), listed(methods, METHODS), workload, seconds, steps, every, deadline, loopback
    )  # fmt: skip
    fixed = {"ranks": RANKS, "dtype": "float32", "source": "measured"}
    chosen = choose(parts, PARTS)
    for part, measure in (("rounds", measure_rounds), ("steps", measure_steps)):
        keys = {method: {(part, method, rate, "") for rate in asked.rates} for method in asked.methods}
        left = [method for method in asked.methods if part in chosen and not keys[method] <= done]
        if left:
            yield [{**fixed, **row} for row in measure(replace(asked, methods=left))]
    for seed, method in product(range(seeds), asked.methods):
        key = key_of({"part": "learn", "method": method, "rate": "none", "seed": seed}, KEY)
        if "learn" in chosen and key not in done:
            print(f"training with {label(method)}, seed {seed}", flush=True)
            yield [{**fixed, **row} for row in measure_learning(replace(asked, methods=[method]), seed)]
