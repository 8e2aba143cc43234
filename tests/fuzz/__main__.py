"""`python -m tests.fuzz`: see `tests.fuzz.campaign`."""

from __future__ import annotations

import json
import math
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tests.fuzz import campaign
from tests.fuzz.record import BLOCK, Minutes, Record, RecordFile
from tests.fuzz.target import Seed, Target
from tests.fuzz.targets import targets


def main(
    cases: Annotated[int, typer.Option(help="Inputs for each target.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Seed of the first block of inputs.")] = 0,
    target: Annotated[list[str] | None, typer.Option(help="One target; may be repeated. Default: all.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Run one input that a failure has written.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each block.")] = False,
    minutes: Minutes = math.inf,
    record: RecordFile = None,
) -> None:
    """Try damaged and made-up bytes on every reader."""
    known = targets()
    chosen = target or list(known)
    for name in chosen:
        if name not in known:
            raise typer.BadParameter(f"There is no target {name!r}. Known: {', '.join(known)}.")
    if replay:
        for name in chosen:
            read_again(known[name], replay.read_bytes())
        return
    failed, end, book = 0, time.monotonic() + 60 * minutes, Record(record, "random")
    for name in book.due(chosen, cases, end):
        if sys.stderr.isatty():
            print(f"\r{name} ...", end="", file=sys.stderr)
        reproducer = Path(f"fuzz-failure-{name.replace(':', '-')}.bin")
        block = seed + book.blocks[name]
        outcome = campaign.run(known[name], min(BLOCK, cases - book.cases[name]), block, reproducer)
        book.add(name, outcome.cases, outcome.failure)
        failed += bool(outcome.failure)
        print(json.dumps(asdict(outcome)) if as_json else line(outcome), flush=True)
        if outcome.failure:
            print(f"  input in {reproducer}; seed {block}", file=sys.stderr)
    raise typer.Exit(1 if failed else 0)


def read_again(target: Target, data: bytes) -> None:
    """Read one input as every tensor of the corpus."""
    for spec in {start.spec for start in target.corpus()}:
        for attempt in range(20):
            target.check(data, Seed(data, spec), random.Random(attempt))


def line(outcome: campaign.Outcome) -> str:
    rate = outcome.cases / max(outcome.seconds, 1e-9)
    return (
        f"\r{outcome.target:20} {outcome.cases:9} cases, {outcome.taken:8} taken, {outcome.refused:8} refused, "
        f"{rate:8.0f}/s, memory +{outcome.grown_bytes >> 20} MiB  {outcome.failure or 'ok'}"
    )


if __name__ == "__main__":
    typer.run(main)
