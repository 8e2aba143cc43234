"""What the fuzz campaigns have tried, in a file that several sittings add to.

``tests/fuzzed.csv`` is committed, so that another machine goes on where the last one ended. Cases count since the last
failure of their target. They may be of several commits, which the record names.
"""

from __future__ import annotations

import csv
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from tests.commits import EVERYTHING, last_commit

BLOCK = 50_000
"""Cases that are tried, and recorded, at a time."""
Minutes = Annotated[float, typer.Option(help="Minutes after which no further block of inputs starts.")]
RecordFile = Annotated[Path | None, typer.Option(help="File of the cases of all sittings, which are not tried again.")]
COLUMNS = ("commit", "campaign", "target", "cases", "failure")


class Record:
    """The cases of one campaign.

    Args:
        path: File; None for a record of this sitting alone.
        campaign: Name of the campaign.

    Attributes:
        cases: Cases of each target since its last failure.
        blocks: Blocks that each target has begun. Each has a seed of its own.
        failures: Blocks of each target that have failed.
    """

    def __init__(self, path: Path | None, campaign: str) -> None:
        self._path, self._campaign, self._commit = path, campaign, last_commit(*EVERYTHING) if path else ""
        self.cases: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        if path is not None and path.exists():
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    if row["campaign"] == campaign:
                        self._count(row["target"], int(row["cases"]), row["failure"])

    def _count(self, target: str, cases: int, failure: str) -> None:
        self.blocks[target] += 1
        self.failures[target] += bool(failure)
        self.cases[target] = 0 if failure else self.cases[target] + cases

    def due(self, targets: Sequence[str], cases: int, end: float) -> Iterator[str]:
        """Targets that lack cases, each as often as it is due, until the end. One that fails is not tried again."""
        for target in targets:
            failures = self.failures[target]
            while self.cases[target] < cases and self.failures[target] == failures and time.monotonic() < end:
                yield target

    def add(self, target: str, cases: int, failure: str) -> None:
        """Note that a block of cases has ended."""
        self._count(target, cases, failure)
        if self._path is None:
            return
        is_new = not self._path.exists()
        with self._path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow(COLUMNS)
            writer.writerow((self._commit, self._campaign, target, cases, failure.partition("\n")[0]))
