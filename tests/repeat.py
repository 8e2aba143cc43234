"""Repeat the tests of faults, and count: none of them may fail once in 200 runs on a busy machine.

    python -m tests.repeat --runs 200 --hours 2       # goes on where the last sitting ended
    python -m tests.repeat --test tests/integration/test_exit.py

The tests are those that docs/reliability.md names under A to D, in all their forms except those marked slow. They run
on twice as many processes as there are cores, so that the machine is busy. Each end of a test is a line of JSON in
``record.jsonl``, and each failure's output a file next to it. Runs count for the commit that they were made with; a
tree with changes counts as another commit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated

import pytest
import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
Counts = dict[str, Counter[str]]
"""Of each test, its ends: passed, failed, skipped."""


def fault_tests() -> list[str]:
    """Tests that docs/reliability.md names under A to D."""
    rows = re.findall(r"^\| [A-D]\d \|.*$", PAGE.read_text(), re.MULTILINE)
    return list(dict.fromkeys(re.findall(r"`(tests/[\w/]+\.py::test_\w+)`", "\n".join(rows))))


def commit() -> str:
    """The commit of this tree, and whether it has changes."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + "-dirty" * bool(git("status", "--porcelain"))


class Recorder:
    """A pytest plugin that writes the end of each test down at once.

    Args:
        folder: Folder of the record.
        of: Commit.
        end: When to stop, by the monotonic clock.
    """

    def __init__(self, folder: Path, of: str, end: float) -> None:
        self._folder, self._commit, self._end = folder, of, end
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self._failed:
            self._failed.add(report.nodeid)  # by its first phase that fails; a crashed process has no others
            self._write(report, "failed", {"output": self._keep(report)})
        elif report.skipped:
            self._write(report, "skipped", {"reason": str(report.longrepr)})
        elif report.when == "teardown" and report.nodeid not in self._failed:
            self._write(report, "passed", {})
        if time.monotonic() > self._end:
            pytest.exit("The time is up. Run the command again to go on.", 0)

    def _keep(self, report: pytest.TestReport) -> str:
        """Write all output of a failure to a file, and return its name."""
        name = f"{re.sub(r'[^A-Za-z0-9]+', '-', report.nodeid)[-150:]}-{time.time_ns()}.txt"
        sections = [f"--- {title} ---\n{text}" for title, text in report.sections]
        (self._folder / name).write_text("\n".join([report.nodeid, report.longreprtext, *sections]))
        return name

    def _write(self, report: pytest.TestReport, ended: str, more: dict[str, str]) -> None:
        row = {"commit": self._commit, "test": report.nodeid, "ended": ended, "at": round(time.time())}
        with (self._folder / "record.jsonl").open("a") as file:
            file.write(json.dumps(row | more) + "\n")


class Collector:
    """A pytest plugin that keeps the names of all tests that would run."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid for item in session.items]


def counts(folder: Path, of: str) -> Counts:
    """Counts of what the record has of a commit."""
    found: Counts = defaultdict(Counter)
    record = folder / "record.jsonl"
    for line in record.read_text().splitlines() if record.exists() else ():
        row = json.loads(line)
        if row["commit"] == of:
            found[row["test"]][row["ended"]] += 1
    return found


def table(names: list[str], found: Counts) -> Table:
    """A line for each test, with all that failed first."""
    made = Table("test", "passed", "failed", "could not run")
    for name in sorted(names, key=lambda name: (-found[name]["failed"], name)):
        made.add_row(name, *(str(found[name][ended]) for ended in ("passed", "failed", "skipped")))
    total = sum((found[name] for name in names), Counter[str]())
    made.add_row("all", *(str(total[ended]) for ended in ("passed", "failed", "skipped")), style="bold")
    return made


def main(
    runs: Annotated[int, typer.Option(help="Runs of each test, over all sittings.")] = 200,
    hours: Annotated[float, typer.Option(help="Length of this sitting.")] = 1.0,
    folder: Annotated[Path, typer.Option(help="Folder of the record and of what failed.")] = ROOT / "build" / "repeat",
    test: Annotated[list[str] | None, typer.Option(help="A test, or a file of tests; may be repeated.")] = None,
    processes: Annotated[int, typer.Option(help="Tests at the same time.")] = 2 * (os.cpu_count() or 1),
) -> None:
    """Repeat the tests of faults, and count."""
    folder.mkdir(parents=True, exist_ok=True)
    of, collector, end = commit(), Collector(), time.monotonic() + 3600 * hours
    chosen = ["-q", "-p", "no:cacheprovider", "-m", "not slow", *(test or fault_tests())]
    if pytest.main(["--collect-only", "-qq", *chosen], plugins=[collector]) or not collector.names:
        raise typer.Exit(2)
    while time.monotonic() < end:
        found = counts(folder, of)
        due = [name for name in collector.names if found[name].total() < runs]
        if not due:
            break
        options = ["-n", str(processes), "--dist", "loadfile", "--timeout", "400", "--tb", "short", *chosen[:5], *due]
        if pytest.main(options, plugins=[Recorder(folder, of, end)]) > pytest.ExitCode.TESTS_FAILED:
            break  # Ctrl-C, or pytest cannot go on
    found = counts(folder, of)
    Console(width=200).print(f"Commit {of}:", table(collector.names, found))
    raise typer.Exit(1 if any(found[name]["failed"] for name in collector.names) else 0)


if __name__ == "__main__":
    typer.run(main)
