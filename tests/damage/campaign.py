"""The campaign of damaged state: a parameter server's files are cut, zeroed and flipped at every byte.

    python -m tests.damage              # every byte
    python -m tests.damage --every 29   # the short form, which `test_campaign.py` runs

A server that is started on damaged files has one of three outcomes. Anything else is a failure:

- same: it has the state of the undamaged files, bit for bit.
- older: it has the state of the records before the first damaged byte of the newest journal, bit for bit, and the log
  names the file, unless it was cut between two records: that is what a server leaves that has received no more.
- refused: an error names the file and says what to do. If it gives a command that goes back to the state before the
  damage, the command does that.

In all cases the files stay as they are. What each file may lead to is in `TARGETS`.
"""

from __future__ import annotations

import logging
import os
import random
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from gradwire.core.errors import StateError
from gradwire.parameter_server.journal import Journal
from gradwire.parameter_server.server import ServerStateMachine
from gradwire.parameter_server.shard import ParameterShard
from tests.parameter_server.harness import EPOCH
from tests.parameter_server.recorded import Recorded, contents

NEWEST = "journal-2"


@dataclass(frozen=True)
class Target:
    """A file to damage.

    Attributes:
        name: Name of the file.
        allowed: Outcomes that are right.
        missing: Files that are not there meanwhile.
    """

    name: str
    allowed: frozenset[str]
    missing: tuple[str, ...] = ()


SAME, REFUSED, CUT = frozenset({"same"}), frozenset({"refused"}), frozenset({"older", "refused"})
_WITHOUT = ("checkpoint-2.safetensors",)
TARGETS = [
    Target(NEWEST, CUT),
    Target("checkpoint-2.safetensors", SAME),
    Target("journal-1", SAME),
    Target("checkpoint-1.safetensors", SAME),
    Target(NEWEST, CUT, _WITHOUT),
    Target("journal-1", REFUSED, _WITHOUT),
    Target("checkpoint-1.safetensors", REFUSED, _WITHOUT),
]
DAMAGES: dict[str, Callable[[bytes, int], bytes]] = {
    "cut here": lambda content, at: content[:at],
    "byte zeroed": lambda content, at: content[:at] + b"\0" + content[at + 1 :],
    "zeros from here": lambda content, at: content[:at] + bytes(len(content) - at),
    "garbage from here": lambda content, at: content[:at] + random.Random(at).randbytes(len(content) - at),
    "bit flipped": lambda content, at: content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :],
}


class WrongStateError(AssertionError):
    """A server has started on damaged files with a state that it may not have, or has left it unsaid."""


class Log(logging.Handler):
    """What gradwire has logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


class State:
    """Two checkpoints and two journals of a job that was killed in the middle of a step.

    Args:
        folder: Folder of the files.

    Attributes:
        history: Digest of the state after each record of the newest journal, by the record's end in the file.
        files: Content of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.history: dict[int, bytes] = {}
        job = _Watched(folder, self._note)
        job.start()
        while job.journal._number < 2:
            job.train(1)
        job.train(1)
        for worker in job.workers[:1]:
            worker.push(job.grads())
        job.settle()
        job.kill()
        self.files = contents(folder)

    def _note(self, job: Recorded) -> None:
        file = job.journal._file
        assert file is not None, "open"
        if job.journal._number == 2:  # the record that has led to the checkpoint, too
            present, job.machine.present = job.machine.present, set()  # a server that starts again has nobody
            self.history[file.num_bytes] = job.journal._checkpoints.digest(0)
            job.machine.present = present

    def put(self, files: dict[str, bytes]) -> None:
        """Make these the files of the folder."""
        for name in contents(self.folder):
            if name not in files:
                (self.folder / name).unlink()
        for name, content in files.items():
            (self.folder / name).write_bytes(content)

    def start(self) -> bytes:
        """Start a server, and return the digest of its state."""
        machine = ServerStateMachine(2, EPOCH, ParameterShard())
        journal = Journal(self.folder, machine)
        journal.restore()
        digest = journal._checkpoints.digest(0) if machine.initialized else b""
        journal.close(checkpoint=False)
        return digest

    def before(self, at: int) -> bytes:
        """Digest of the state of the newest journal's records before a byte."""
        return self.history[max(end for end in self.history if end <= at)]

    def outcome(self, name: str, files: dict[str, bytes], log: Log) -> str:
        """Start a server on these files, of which one is damaged.

        Raises:
            WrongStateError: The outcome is none of the three.
        """
        self.put(files)
        log.text = ""
        try:
            digest = self.start()
        except StateError as error:
            _expect(contents(self.folder) == files, "a refusal has changed the files")
            self._check_refusal(name, files, str(error))
            return "refused"
        _expect(contents(self.folder) == files, "starting has changed the files")
        if digest == self.history[len(self.files[NEWEST])]:
            return "same"
        begin = _first_difference(self.files[NEWEST], files[NEWEST])
        _expect(digest == self.before(begin), "a state that is not that of the records before the damage")
        between = len(files[NEWEST]) == begin and begin in self.history
        _expect(between or str(self.folder / name) in log.text, f"the log does not name the file: {log.text}")
        return "older"

    def _check_refusal(self, name: str, files: dict[str, bytes], error: str) -> None:
        named = [str(self.folder / each) for each in (name, *(self.files.keys() - files.keys()))]
        _expect(any(each in error for each in named), f"an error that does not name the file: {error}")
        _expect("Restore the folder from a copy" in error, f"an error without advice: {error}")
        command = re.search("run: truncate -s ([0-9]+) (.*)$", error)
        if command:
            os.truncate(shlex.split(command[2])[0], int(command[1]))
            begin = _first_difference(self.files[NEWEST], files[NEWEST])
            _expect(self.start() == self.before(begin), "the command does not lead to the state before the damage")


class _Watched(Recorded):
    """Tells after each record."""

    def __init__(self, folder: Path, note: Callable[[Recorded], None]) -> None:
        self.told = note
        super().__init__(folder, 600, shapes=((20,),))

    def deliver(self, worker) -> None:
        super().deliver(worker)
        self.told(self)


@dataclass
class Counts:
    """What came of the damage to one file."""

    target: Target
    num_bytes: int
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)


def run(folder: Path, every: int = 1) -> Iterator[Counts]:
    """Damage the files at every byte whose number is a multiple of `every`.

    Raises:
        WrongStateError: A server has started with a wrong state, or refused without saying why.
    """
    state = State(folder)
    log = Log()
    logging.getLogger("gradwire").addHandler(log)
    try:
        for target in TARGETS:
            yield _run_target(state, target, every, log)
    finally:
        logging.getLogger("gradwire").removeHandler(log)


def _run_target(state: State, target: Target, every: int, log: Log) -> Counts:
    name = target.name
    whole = {each: content for each, content in state.files.items() if each not in target.missing}
    counts = Counts(target, len(whole[name]))
    for damage, change in DAMAGES.items():
        outcomes = counts.outcomes[damage] = Counter()
        for at in range(0, len(whole[name]), every):
            damaged = change(whole[name], at)
            if damaged == whole[name]:
                continue
            try:
                outcome = state.outcome(name, {**whole, name: damaged}, log)
                _expect(outcome in target.allowed, f"{outcome}, which is not of {sorted(target.allowed)}")
            except Exception as error:
                raise WrongStateError(f"{target}, {damage}, byte {at}: {error!r}") from error
            outcomes[outcome] += 1
    return counts


def _first_difference(one: bytes, other: bytes) -> int:
    differs = (at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1])
    return next(differs, min(len(one), len(other)))


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise WrongStateError(problem)


def main(every: Annotated[int, typer.Option(min=1, help="Distance of the bytes that are damaged.")] = 1) -> None:
    """Damage a parameter server's files, and count what comes of it."""
    total = 0
    with tempfile.TemporaryDirectory() as folder:
        for counts in run(Path(folder) / "state", every):
            without = "".join(f", without {each}" for each in counts.target.missing)
            print(f"{counts.target.name} ({counts.num_bytes} bytes{without})")
            for damage, outcomes in counts.outcomes.items():
                total += sum(outcomes.values())
                print(
                    f"  {damage:18}", ", ".join(f"{outcomes[each]:5} {each}" for each in ("same", "older", "refused"))
                )
    print(f"{total} cases, and no wrong state.")
