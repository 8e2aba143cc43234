"""How soon `auto` notices changed links: a job in the lab at 1 Gb/s, then 50 Mb/s, then 1 Gb/s again.

Four ranks replay the recorded backward pass of the main workload with ``attach(ddp, "auto")``. After a decision and
some further steps, all links are changed under the running job, and later changed back. The record has the number of
steps from each change to the next decision, if there is one, the step times right after the change and at the end of
each rate, and whether all ranks end with the same bits.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks import ranks
from benchmarks.options import Rates, listed
from benchmarks.ranks import say
from gradwire.bench.job import BenchmarkJob, Segment
from gradwire.bench.methods import AUTO, Automatic
from gradwire.bench.rank import Rank
from gradwire.bench.recording import record
from gradwire.bench.replay import Replay
from gradwire.bench.segment import is_identical
from gradwire.lab import Lab

QUIET_STEPS = 25  # after each decision, before the next change
PATIENCE_STEPS = 250  # without a decision, before the next change
LIMIT_SECONDS = 600


@dataclass
class Watch:
    """Messages of rank 0, and the parent's reactions.

    Attributes:
        seconds: Duration of each step.
        decisions: Step and text of each decision.
        changes: Steps after which links were changed, from the second rate on.
        identical: Whether all ranks ended with the same bits.
    """

    lab: Lab
    rates: list[str]
    seconds: list[float] = field(default_factory=list)
    decisions: list[tuple[int, str]] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)
    identical: bool | None = None

    def on_line(self, host: int, stream: str, line: str) -> None:
        """A line of a rank."""
        if stream == "stderr" or not line.startswith("{"):
            return
        said = json.loads(line)
        if "seconds" in said:
            self.seconds.append(said["seconds"])
            print(f"step {len(self.seconds)}: {said['seconds']:.3f} s by {said['way']}", file=sys.stderr)
        elif "text" in said:
            self.decisions.append((len(self.seconds), said["text"]))
            print(said["text"])
        elif "change" in said:
            self.changes.append(len(self.seconds))
            self.lab.set_rate(self.rates[len(self.changes)])
            print(f"After step {len(self.seconds)}: links to {self.rates[len(self.changes)]}.")
        elif "identical" in said:
            self.identical = said["identical"]


def run(
    rates: Rates = "1gbit,50mbit,1gbit",
    workload: Annotated[str, typer.Option(help="What the ranks train.")] = "text",
) -> list[dict[str, Any]]:
    """Run the job."""
    chosen = listed(rates, ())
    with Lab(4, chosen[0]) as lab, tempfile.TemporaryDirectory() as folder:
        watch = Watch(lab, chosen)
        command = ranks.command(__name__, "work", workload, folder, len(chosen))
        lab.run(command, on_line=watch.on_line, timeout=LIMIT_SECONDS, capture=False).check()
    return list(_figures(watch, workload))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each figure."""
    return "\n".join(f"{row['rate'] or '':8}{row['metric']:60}{row['value']:8.3g} {row['unit']}" for row in rows)


def _figures(watch: Watch, workload: str) -> Iterator[dict[str, Any]]:
    fixed = {"method": f"auto, {workload}", "ranks": 4, "source": "measured", "dtype": "float32"}
    starts = [0, *watch.changes]
    for rate, start, end in zip(watch.rates, starts, [*watch.changes, len(watch.seconds)], strict=True):
        here = fixed | {"rate": rate}
        decisions = [(step, text) for step, text in watch.decisions if start < step <= end]
        if decisions:
            yield here | {"metric": "steps to the decision", "value": decisions[0][0] - start, "unit": "steps"}
        if start:
            first = watch.seconds[start + 1 : start + 6]
            yield here | {"metric": "step after the change", "value": median(first), "unit": "s"}
        yield here | {"metric": "step at the end", "value": median(watch.seconds[end - QUIET_STEPS : end]), "unit": "s"}
        for _, text in decisions:
            yield here | {"metric": text, "value": 1, "unit": "decision"}
    yield fixed | {"metric": "replicas identical", "value": int(bool(watch.identical)), "unit": "bool"}


# -- one rank --------------------------------------------------------------------------------------------------------


def work(workload: str, folder: str, num_rates: int) -> None:
    """Take steps until each rate has had a decision, or enough steps without one, and then some quiet steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank(BenchmarkJob(workload, (), folder=folder))
    replay = Replay.begin(rank, Segment(AUTO), record(rank, 25.0))
    assert isinstance(replay.connection, Automatic)
    pilot = replay.connection.autopilot
    tell = say if rank.rank == 0 else lambda **_: None
    for index in range(num_rates):
        if index:
            tell(change=True)
        before, steps, quiet = len(pilot.decisions), 0, 0
        while quiet < QUIET_STEPS:
            seen = len(pilot.decisions)
            tell(seconds=replay.step()[1], way=pilot.current.name)
            steps += 1
            if len(pilot.decisions) > seen:
                tell(text=str(pilot.decisions[-1]))
            done = len(pilot.decisions) > before or steps > PATIENCE_STEPS
            quiet = quiet + 1 if pilot.settled and done else 0
    gradients = [parameter.grad for parameter in replay.ddp.parameters() if parameter.grad is not None]
    identical = is_identical(gradients)
    tell(identical=identical)
    replay.connection.close()
    dist.destroy_process_group()
