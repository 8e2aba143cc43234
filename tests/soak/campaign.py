"""Jobs with random faults, one after another, until the time is up.

    python -m tests.soak --hours 1                 # needs root, for the lab
    python -m tests.soak --only mesh:4711          # one job again

The first third of the time goes to jobs in which nobody is killed, one of each kind, in which memory must not grow. All
others are short, and lose processes. Threads and descriptors must not grow in any.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.soak.job import BrokenPromiseError, Job, Outcome, Vitals
from tests.soak.mesh import Mesh
from tests.soak.servers import AggregatorJob, DatagramJob, ParameterServerJob

KINDS: dict[str, type[Job]] = {each.kind: each for each in (Mesh, ParameterServerJob, AggregatorJob, DatagramJob)}
SETTLED_SECONDS = 10.0  # from this age on, a process has all its threads and descriptors
LONG_SECONDS = 120.0  # from this age on, its memory must have stopped growing
MAX_BYTES_AN_HOUR = 64 << 20
MOST_MORE = 2  # threads or descriptors that come and go, such as those of a connection that is made again


@dataclass
class Totals:
    """What all jobs of a kind have counted."""

    jobs: int = 0
    steps: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    growth: list[tuple[float, float, float]] = field(default_factory=list)
    """Of each process that lived long: bytes, threads and descriptors an hour."""


def run_job(kind: str, seed: int, scale: float = 1.0, deadly: bool = True) -> Outcome:
    """Run one job.

    Raises:
        BrokenPromiseError: A promise was broken.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-soak-") as folder:
        outcome = KINDS[kind](seed, Path(folder), scale, deadly).run()
    for vitals in outcome.vitals:
        check_growth(vitals)
    return outcome


def check_growth(vitals: Vitals) -> None:
    """Check that a process has not grown: threads and descriptors after 10 s, memory after 120 s.

    Raises:
        BrokenPromiseError: It does.
    """
    if vitals.duration < SETTLED_SECONDS:
        return
    quarter = len(vitals.seconds) // 4
    for name, values in (("threads", vitals.threads), ("descriptors", vitals.descriptors)):
        early, late = max(values[quarter : 2 * quarter]), max(values[-quarter:])
        if late > early + MOST_MORE:
            raise BrokenPromiseError(f"{vitals.name}: {name} grew from {early} to {late}.")
    if vitals.duration >= LONG_SECONDS and (slope := vitals.slope(vitals.memory)) > MAX_BYTES_AN_HOUR:
        raise BrokenPromiseError(f"{vitals.name}: memory grows by {slope / 2**20:.0f} MB an hour.")


def campaign(seconds: float, first: int, kinds: list[str], log: Path | None, console: Console) -> dict[str, Totals]:
    """Run jobs until the time is up; return the totals by kind."""
    totals = {kind: Totals() for kind in kinds}
    end, seed = time.monotonic() + seconds, first
    lengths = [(kind, seconds / 3 / len(kinds)) for kind in kinds if seconds / 3 / len(kinds) > LONG_SECONDS]
    while time.monotonic() < end:
        kind, length = lengths.pop(0) if lengths else (kinds[seed % len(kinds)], 0.0)
        rate = totals[kind].steps / totals[kind].seconds if totals[kind].seconds else 10.0
        scale = max(1.0, length * rate / 225)  # a job has 225 steps on average
        began, error = time.monotonic(), ""
        found = Outcome()
        try:
            found = run_job(kind, seed, scale, deadly=not length)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            console.print(f"{kind}:{seed} failed: {error}", style="red", markup=False)
        took, one = time.monotonic() - began, totals[kind]
        one.jobs, one.steps, one.seconds = one.jobs + 1, one.steps + found.steps, one.seconds + took
        one.faults += found.faults
        one.failures += [f"{kind}:{seed}"] if error else []
        one.growth += [
            (each.slope(each.memory), each.slope(each.threads), each.slope(each.descriptors))
            for each in found.vitals
            if each.duration >= LONG_SECONDS
        ]
        row = {"job": f"{kind}:{seed}", "seconds": round(took, 1), "steps": found.steps, "scale": round(scale, 2)}
        if log is not None:
            with log.open("a") as file:
                file.write(json.dumps(row | {"faults": dict(found.faults), "error": error}) + "\n")
        console.print(f"{row['job']}: {found.steps} steps in {took:.0f} s, {dict(found.faults)}", markup=False)
        seed += 1
    return totals


def table(totals: dict[str, Totals]) -> Table:
    """A line for each kind."""
    names = sorted({name for one in totals.values() for name in one.faults})
    found = Table("kind", "jobs", "steps", *names, "failures", "MB, threads, files an hour, at most")
    for kind, one in totals.items():
        worst = [max((growth[at] for growth in one.growth), default=None) for at in range(3)]
        memory, *rest = worst
        grown = "" if memory is None else f"{memory / 2**20:+.1f}, " + ", ".join(f"{each:+.1f}" for each in rest)
        counts = [str(one.faults[name]) for name in names]
        found.add_row(kind, str(one.jobs), str(one.steps), *counts, str(len(one.failures)), grown)
    return found


def main(
    hours: Annotated[float, typer.Option(help="How long.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the first job.")] = 0,
    kinds: Annotated[str, typer.Option(help="Kinds of jobs.")] = ",".join(KINDS),
    only: Annotated[str, typer.Option(help="Run one job again, such as mesh:4711.")] = "",
    log: Annotated[Path | None, typer.Option(help="File to which a line of JSON is added for each job.")] = None,
) -> None:
    """Kill, freeze and restart processes of real jobs for hours, and check every value."""
    if only:
        kind, _, number = only.partition(":")
        print(run_job(kind, int(number)).faults)
        return
    console = Console(width=160)
    totals = campaign(3600 * hours, seed, kinds.split(","), log, console)
    console.print(table(totals))
    failures = [failure for one in totals.values() for failure in one.failures]
    if failures:
        console.print(f"Again: python -m tests.soak --only {failures[0]}. Failed: {', '.join(failures)}", markup=False)
    raise typer.Exit(1 if failures else 0)
