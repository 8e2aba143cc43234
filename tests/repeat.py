"""Repeat the tests of faults, and count: none of them may fail once in 200 runs on a busy machine.

    python -m tests.repeat --runs 200 --hours 2       # goes on where the last sitting ended
    python -m tests.repeat --test tests/integration/test_exit.py

The tests are those that docs/reliability.md names under A to D, except those marked slow and those in which nothing
fails (`NOTHING_FAILS`). A test with several forms (its parameters) runs in all of them, as often as it takes to have
all runs together: of 200 runs of a test with six forms, each form has 34. They run on twice as many processes as there
are cores, so that the machine is busy. Each end of a test is a line of JSON in ``build/repeat/ends.jsonl``, and each
failure's output a file next to it. At the start and at the end of a sitting, the counts of these lines are added to
``tests/repeated.csv``, which is committed, so that another machine goes on there.

What counts are the runs of a form since its last one that failed. They may be of several commits, which the record
names; a tree with changes is named as such. A form that fails is not run again in the same sitting.
"""

from __future__ import annotations

import copy
import csv
import json
import os
import re
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from rich.console import Console
from rich.table import Table

from tests.commits import EVERYTHING, ROOT, last_commit

PAGE = ROOT / "docs" / "reliability.md"
RECORD = ROOT / "tests" / "repeated.csv"
ENDS = ("passed", "failed", "skipped")
NOTHING_FAILS = {
    *("B5", "B9", "D2", "D3"),
    "tests/test_deadlines.py::test_every_wait_has_a_deadline_or_is_listed_with_its_reason",
    "tests/integration/test_ddp.py::test_replicas_are_identical_after_many_steps",
}
"""Promises of the page about jobs in which nothing fails, and such tests of other promises."""
COLUMNS = ("commit", "test", *ENDS, "passed_since_failure")
COPIES = "GRADWIRE_REPEAT_COPIES"
"""Environment variable: how often each form runs in a run of pytest that has this module as a plugin, as JSON."""
MAX_COPIES = 10


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run each form several times, and all others in between; as a plugin of the processes that run them."""
    copies = json.loads(os.environ.get(COPIES, "{}"))
    turns = range(max(copies.values(), default=1))
    items[:] = [_copy(item) if turn else item for turn in turns for item in items if copies.get(item.nodeid, 1) > turn]


def _copy(item: pytest.Item) -> pytest.Item:
    """A test of its own: pytest would not set up the same one again if it followed on itself."""
    assert isinstance(item, pytest.Function)
    copied = copy.copy(item)
    copied._report_sections, copied.stash = [], pytest.Stash()
    copied._initrequest()
    return copied


@dataclass
class Runs:
    """How the runs of a test ended.

    Attributes:
        passed: Number of runs that passed.
        failed: Number of runs that failed.
        skipped: Number of runs that could not run here.
        passed_since_failure: Number of runs that passed after the last one that failed.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    passed_since_failure: int = 0

    def __add__(self, later: Runs) -> Runs:
        before = 0 if later.failed else self.passed_since_failure
        return Runs(
            self.passed + later.passed,
            self.failed + later.failed,
            self.skipped + later.skipped,
            before + later.passed_since_failure,
        )


ONE = {"passed": Runs(passed=1, passed_since_failure=1), "failed": Runs(failed=1), "skipped": Runs(skipped=1)}
Counts = dict[str, Runs]
"""Runs of each test."""


def fault_tests() -> list[str]:
    """Tests that docs/reliability.md names under A to D, for promises about jobs in which something fails."""
    rows = re.findall(r"^\| ([A-D]\d) \|(.*)$", PAGE.read_text(), re.MULTILINE)
    said = "\n".join(row for promise, row in rows if promise not in NOTHING_FAILS)
    named = dict.fromkeys(re.findall(r"`(tests/[\w/]+\.py::test_\w+)`", said))
    return [name for name in named if name not in NOTHING_FAILS]


class Recorder:
    """A pytest plugin that writes the end of each test down at once.

    Args:
        folder: Folder of the record.
        of: Commit.
        end: When to stop, by the monotonic clock.

    Attributes:
        failed: Names of the tests that have failed.
    """

    def __init__(self, folder: Path, of: str, end: float) -> None:
        self._folder, self._commit, self._end = folder, of, end
        self.failed: set[str] = set()
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed and report.nodeid not in self.failed:
            self.failed.add(report.nodeid)  # by its first phase that fails; a crashed process has no others
            self._write(report, "failed", {"output": self._keep(report)})
        elif report.skipped:
            self._write(report, "skipped", {"reason": str(report.longrepr)})
        elif report.when == "teardown" and report.nodeid not in self.failed:
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
        row["seconds"] = round(self._seconds.pop(report.nodeid), 2)
        with (self._folder / "ends.jsonl").open("a") as file:
            file.write(json.dumps(row | more) + "\n")


class Collector:
    """A pytest plugin that keeps the names of all tests that would run."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid for item in session.items]


def needed(names: list[str], runs: int) -> dict[str, int]:
    """Runs that each form needs, so that all forms of a test have `runs` of them together."""
    forms = Counter(name.partition("[")[0] for name in names)
    return {name: -(-runs // forms[name.partition("[")[0]]) for name in names}


def add_ends(folder: Path, record: Path) -> None:
    """Count the ends that a sitting has left in `folder`, add the counts to the record, and put the ends aside."""
    ends = folder / "ends.jsonl"
    if not ends.exists():
        return
    found = by_commit(record)
    for line in ends.read_text().splitlines():
        row = json.loads(line)
        found[row["commit"], row["test"]] += ONE[row["ended"]]
    with record.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        # The commits of a test stay in the order of its runs.
        for (of, test), runs in sorted(found.items(), key=lambda each: each[0][1]):
            writer.writerow({"commit": of, "test": test} | asdict(runs))
    ends.rename(folder / f"counted-{time.time_ns()}.jsonl")


def by_commit(record: Path) -> dict[tuple[str, str], Runs]:
    """Runs of each commit and test over all sittings."""
    found: dict[tuple[str, str], Runs] = defaultdict(Runs)
    if record.exists():
        with record.open(newline="") as file:
            for row in csv.DictReader(file):
                found[row["commit"], row["test"]] += Runs(**{name: int(row[name]) for name in COLUMNS[2:]})
    return found


def counts(record: Path) -> Counts:
    """Runs of each test over all sittings."""
    found: Counts = defaultdict(Runs)
    for (_, test), runs in by_commit(record).items():
        found[test] += runs
    return found


def table(names: list[str], found: Counts) -> Table:
    """A line for each test, those that failed first."""
    made = Table("test", "passed", "failed", "could not run", "passed since a failure")
    for name in sorted(names, key=lambda name: (-found[name].failed, name)):
        made.add_row(name, *(str(value) for value in asdict(found[name]).values()))
    total = sum((found[name] for name in names), Runs())
    made.add_row("all", *(str(getattr(total, name)) for name in ENDS), "", style="bold")
    return made


def main(
    runs: Annotated[int, typer.Option(help="Runs of each test, over all its forms and all sittings.")] = 200,
    hours: Annotated[float, typer.Option(help="Length of this sitting.")] = 1.0,
    folder: Annotated[Path, typer.Option(help="Folder of a sitting, and of what failed.")] = ROOT / "build" / "repeat",
    record: Annotated[Path, typer.Option(help="File of the counts of all sittings.")] = RECORD,
    test: Annotated[list[str] | None, typer.Option(help="A test, or a file of tests; may be repeated.")] = None,
    processes: Annotated[int, typer.Option(help="Tests at the same time.")] = 2 * (os.cpu_count() or 1),
) -> None:
    """Repeat the tests of faults, and count."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 3600 * hours
    collector, recorder = Collector(), Recorder(folder, last_commit(*EVERYTHING), end)
    chosen = ["-q", "-p", "no:cacheprovider", "-m", "not slow", *(test or fault_tests())]
    if pytest.main(["--collect-only", "-qq", *chosen], plugins=[collector]) or not collector.names:
        raise typer.Exit(2)
    while time.monotonic() < end:
        add_ends(folder, record)
        found = counts(record)
        wanted = needed(collector.names, runs)
        lacks = {name: wanted[name] - found[name].passed_since_failure - found[name].skipped for name in wanted}
        waiting = recorder.failed  # what has failed waits for its repair
        due = {name: min(MAX_COPIES, lack) for name, lack in lacks.items() if lack > 0 and name not in waiting}
        if not due:
            break
        os.environ[COPIES] = json.dumps(due)
        distribution = ["-n", str(processes), "--dist", "worksteal", "--timeout", "400"]
        options = ["-p", "tests.repeat", *distribution, "--tb", "short", *chosen[:5], *due]
        if pytest.main(options, plugins=[recorder]) > pytest.ExitCode.TESTS_FAILED:
            break  # Ctrl-C, or pytest cannot go on
    add_ends(folder, record)
    Console(width=200).print(table(collector.names, counts(record)))
    raise typer.Exit(1 if recorder.failed else 0)


if __name__ == "__main__":
    typer.run(main)
