"""THC in the lab: shares of a round's time, step times, and time to accuracy (its figures 2a and 5 to 8).

Four ranks and the aggregator have a host each, with links of 100 Mb/s or 1 Gb/s in both directions:

    rounds   all gradients of a model at once, and nothing else: seconds in the worker's codec, in the server's, and the
             rest, which is the wire and waiting; and the bytes of a rank's interface in both directions
    steps    a recorded backward pass replayed as waits, while gradients are synchronized
    learn    a real training on links as they are, with validations. Together with step times: time to accuracy

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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import ranks as processes
from benchmarks.options import Rates, Seconds, choose, listed
from benchmarks.papers.thc.lab_ends import BUCKET_MB, PORT
from gradwire.bench.job import BenchmarkJob, Message, Progress, Segment
from gradwire.bench.launch import ServerProcess, launch
from gradwire.bench.methods import DDP_FP32, is_native, label, strategy
from gradwire.bench.training import TrainingOptions
from gradwire.bench.training import run as train
from gradwire.bench.workloads import make_workload

RANKS = 4
RATES = ("100mbit", "1gbit")
METHODS = (DDP_FP32, "thc@server", "thc@scatter_reduce", "topk:ratio=0.1", "dgc:ratio=0.1/momentum", "terngrad")
PARTS = ("rounds", "steps", "learn")
GOAL = 0.97  # of DDP's last accuracy
KEY, CHOICES = ("part", "method", "rate"), ("parts", "rates", "methods")
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


def measure_learning(asked: Asked) -> Iterator[Row]:
    """Measure accuracy during a training."""
    options = TrainingOptions(
        workload=asked.workload, methods=tuple(asked.methods), ranks=RANKS, rates=(None,), steps=asked.steps,
        validate_every=asked.every, timed_seconds=0.1, buckets_mb=(BUCKET_MB,), lab=False,
        deadline_seconds=asked.deadline,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result = train(options, server=server_process(folder, asked, served(asked.methods)))
    for entry in result.results:
        here = {"part": "learn", "method": entry.method, "rate": "none", "size": result.num_parameters}
        for step, loss, accuracy in entry.validations:
            yield {**here, "metric": "validation_loss", "unit": "nats", "value": loss, "step": step}
            yield {**here, "metric": "validation_accuracy", "unit": "fraction", "value": accuracy, "step": step}


# -- tables ------------------------------------------------------------------------------------------------------------


def find(rows: Sequence[Row], metric: str, method: str, rate: str = "none") -> list[Row]:
    """The figures of one metric."""
    wanted = {"metric": metric, "method": method, "rate": rate}
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def steps_to(rows: Sequence[Row], method: str, goal: float) -> int | None:
    """First validated step with at least this accuracy, or None."""
    reached = (int(row["step"]) for row in find(rows, "validation_accuracy", method) if row["value"] >= goal)
    return min(reached, default=None)


def table_of(rows: Sequence[Row], rate: str) -> str:
    """Markdown table of the figures at one rate."""
    lines = [
        "| method | round, ms | worker | server | wire | there, B | back, B | step, ms | steps to goal | s to goal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = find(rows, "validation_accuracy", DDP_FP32)
    goal = GOAL * float(base[-1]["value"]) if base else None
    for method in sorted(dict.fromkeys(row["method"] for row in rows), key=_place):
        cells = [_cell(rows, metric, method, rate, 1e3, "{:.1f}") for metric in
                 ("round", "round_worker", "round_server", "round_wire")]  # fmt: skip
        cells += [_cell(rows, f"bytes_{way}_an_element", method, rate, 1, "{:.2f}") for way in ("there", "back")]
        cells.append(_cell(rows, "step", method, rate, 1e3, "{:.0f}"))
        count, step = None if goal is None else steps_to(rows, method, goal), find(rows, "step", method, rate)
        cells.append("–" if count is None else str(count))
        cells.append("–" if count is None or not step else f"{count * float(step[0]['value']):.1f}")
        lines.append(f"| {label(method)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(rows: Sequence[Row], metric: str, method: str, rate: str, factor: float, form: str) -> str:
    found = find(rows, metric, method, rate)
    return form.format(factor * float(found[0]["value"])) if found else "–"


def _place(method: str) -> int:
    return METHODS.index(method) if method in METHODS else len(METHODS)


def table(rows: Sequence[Row]) -> str:
    """Tables of the figures at each rate."""
    rates = sorted({row["rate"] for row in rows} - {"none"})
    return "\n\n".join(f"{rate}\n{table_of(rows, rate)}" for rate in rates)


def run(
    parts: Annotated[str, typer.Option(help="rounds, steps, learn, or several.")] = "",
    rates: Rates = "",
    methods: Annotated[str, typer.Option(help="Methods, as `gradwire bench training` takes them.")] = "",
    workload: Annotated[str, typer.Option(help="What the ranks train.")] = "text",
    seconds: Seconds = 4.0,
    steps: Annotated[int, typer.Option(help="Steps of the training.")] = 120,
    every: Annotated[int, typer.Option(help="Steps after which it is validated.")] = 8,
    deadline: Annotated[float, typer.Option(help="Seconds after which a part fails.")] = 1200.0,
    loopback: Annotated[bool, typer.Option("--loopback", help="Without the lab: to see that it runs.")] = False,
) -> Iterator[Row]:
    """Run all parts."""
    asked = Asked(
        listed(rates, RATES), listed(methods, METHODS), workload, seconds, steps, every, deadline, loopback
    )  # fmt: skip
    measures = dict(zip(PARTS, (measure_rounds, measure_steps, measure_learning)))
    for part in choose(parts, PARTS):
        for row in measures[part](asked):
            yield {"ranks": RANKS, "dtype": "float32", "source": "measured", **row}
