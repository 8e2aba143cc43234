"""A job of several processes in the lab, with faults at given steps."""

from __future__ import annotations

import itertools
import json
import os
import queue
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire.lab import Lab

TIMEOUT = 5.0  # seconds of silence after which a process is lost, in all jobs
MARGIN = 8.0  # seconds that a busy machine may add to a promise
START = 120.0  # seconds for processes to start, with all their imports, and for any step
SHORT_FREEZE, LONG_FREEZE = 1.5, 2 * TIMEOUT + 1  # seconds that nobody notices, and after which a process is given up
RATES = (None, "1gbit", "200mbit", "100mbit")
LOSSES = (0, 0, 0.001, 0.01)
_numbers = itertools.count()


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        step: Step of the job after which it happens.
        kind: ``"kill"``, ``"stop"`` (SIGTERM), ``"freeze"``, ``"long freeze"``, or ``"rate"``.
        host: Host that it happens to.
        rate: New rate of all links.
    """

    step: int
    kind: str
    host: int = 0
    rate: str | None = None


@dataclass
class Outcome:
    """What a job has counted.

    Attributes:
        steps: Steps of the job.
        faults: Number of faults by kind.
        vitals: Vitals of each process over time.
    """

    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    vitals: list[Vitals] = field(default_factory=list)


@dataclass
class Vitals:
    """Memory, threads and descriptors of one process over time.

    Attributes:
        name: Job and host.
        seconds: When they were read.
        memory: Resident bytes.
        threads: Number of threads.
        descriptors: Number of open files.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def read(self, pid: int) -> None:
        """Add what the kernel says now, if the process is there."""
        folder = Path(f"/proc/{pid}")
        try:
            pages = int((folder / "statm").read_text().split()[1])
            threads, descriptors = len(os.listdir(folder / "task")), len(os.listdir(folder / "fd"))
        except (OSError, IndexError):
            return
        self.seconds.append(time.monotonic())
        self.memory.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.threads.append(threads)
        self.descriptors.append(descriptors)

    def slope(self, values: list[int]) -> float:
        """Least-squares slope per hour over the second half of the process's life."""
        half = len(values) // 2
        times, late = self.seconds[half:], values[half:]
        if len(late) < 3:
            return 0.0
        middle, mean = sum(times) / len(times), sum(late) / len(late)
        spread = sum((at - middle) ** 2 for at in times)
        return 3600 * sum((at - middle) * (value - mean) for at, value in zip(times, late)) / spread if spread else 0.0

    @property
    def duration(self) -> float:
        """Seconds between the first and the last reading."""
        return self.seconds[-1] - self.seconds[0] if self.seconds else 0.0


class Host:
    """A process on one host. What it says is put into the job's queue."""

    def __init__(self, job: Job, host: int, program: str, /, **parameters: Any) -> None:
        command = [sys.executable, "-m", "tests.soak.programs", program, json.dumps(parameters)]
        self.host = host
        self.last: dict[str, Any] = {}  # of each kind, what it has said last
        self.vitals = Vitals(f"{job.name}, host {host}")
        job.outcome.vitals.append(self.vitals)
        self._errors = job.folder / f"{program}-{host}-{next(_numbers)}.stderr"
        with self._errors.open("wb") as errors:
            self.process = job.lab.popen(
                command, host, env=job.environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._thread = threading.Thread(target=self._listen, args=(job.heard,), daemon=True)
        self._thread.start()

    def _listen(self, heard: queue.SimpleQueue[tuple[Host, str, Any]]) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                kind, said = json.loads(line)
                heard.put((self, kind, said))
        heard.put((self, "gone", time.time()))

    @property
    def gone(self) -> bool:
        """Whether it has ended, and everything that it said was heard."""
        return "gone" in self.last

    @property
    def at_work(self) -> bool:
        """Whether it has started and has not ended."""
        return "ready" in self.last and not self.last.keys() & {"end", "gone"}

    def signal(self, number: int) -> None:
        """Send a signal, if the process is there."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def tail(self) -> str:
        """The end of its standard error."""
        return self._errors.read_text(errors="replace")[-8000:]

    def abort(self) -> None:
        """End it with the stacks of all its threads on standard error."""
        self.signal(signal.SIGABRT)
        self.signal(signal.SIGCONT)
        self.process.wait()


class Job(ABC):
    """A job, drawn by its seed.

    Args:
        seed: Seed of everything that is drawn.
        folder: Folder for state and output.
        scale: Factor for the number of steps.
        deadly: Whether processes are killed. If not, the same ones live as long as the job.
    """

    kind: str
    num_servers = 0

    def __init__(self, seed: int, folder: Path, scale: float = 1.0, deadly: bool = True) -> None:
        self.draw = random.Random(f"{self.kind} {seed}")
        self.name, self.folder, self.seed, self.deadly = f"{self.kind}:{seed}", folder, seed, deadly
        self.ranks = self.draw.choice((2, 3, 4))
        self.steps = int(scale * self.draw.randint(150, 300))
        self.environment = {"GRADWIRE_JOB_KEY": secrets.token_hex(32), "GRADWIRE_DUMP_DIR": str(folder)}
        self.heard: queue.SimpleQueue[tuple[Host, str, Any]] = queue.SimpleQueue()
        self.hosts: dict[int, Host] = {}
        self.outcome = Outcome(self.steps)
        self.faults = sorted(self.draw_faults(), key=lambda fault: fault.step)
        self._thawing: list[tuple[float, Host]] = []
        self._read_at = 0.0

    # -- what a kind defines ---------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Start all processes."""

    @abstractmethod
    def happen(self, fault: Fault) -> None:
        """Let a process be killed, stopped or frozen for long, and check what the others do."""

    @abstractmethod
    def check(self) -> None:
        """Check all values after the job has ended.

        Raises:
            BrokenPromiseError: One is wrong.
        """

    def draw_faults(self) -> Iterator[Fault]:
        """Yield the faults, in any order."""
        hosts = self.ranks + self.num_servers
        for _ in range(self.draw.randint(2, 5)):
            yield Fault(self._drawn_step(), "freeze", self.draw.randrange(hosts))
            yield Fault(self._drawn_step(), "rate", rate=self.draw.choice(RATES))
        if self.deadly:
            for _ in range(self.draw.choice((1, 1, 2))):
                kind = self.draw.choice(("kill", "kill", "stop", "long freeze"))
                yield Fault(self._drawn_step(), kind, self.draw.randrange(hosts))

    def _drawn_step(self) -> int:
        return self.draw.randint(5, self.steps - 20)

    # -- running ---------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run the job to its end.

        Raises:
            BrokenPromiseError: A promise was broken.
        """
        with ExitStack() as stack:
            hosts = self.ranks + self.num_servers
            self.lab = stack.enter_context(Lab(hosts, self.draw.choice(RATES), loss=self.draw.choice(LOSSES)))
            self.start()
            for fault in self.faults:
                self.until(lambda fault=fault: self.step >= fault.step)  # type: ignore[misc]
                if any("end" in host.last for host in self.hosts.values()):
                    break  # too late for the others
                self.outcome.faults[fault.kind] += 1
                if fault.kind == "rate":
                    self.lab.set_rate(fault.rate)
                elif fault.kind == "freeze":
                    self.freeze(self.hosts[fault.host], SHORT_FREEZE)
                else:
                    self.happen(fault)
            self.finish()
            self.check()
        return self.outcome

    def finish(self) -> None:
        """Wait until all processes have ended."""
        self.until(lambda: all(host.gone for host in self.hosts.values()))

    @property
    def workers(self) -> list[Host]:
        """All hosts but servers."""
        return [host for host in self.hosts.values() if host.host >= self.num_servers]

    @property
    def step(self) -> int:
        """Steps that all workers have done."""
        return min((int(host.last.get("step", 0)) for host in self.workers), default=0)

    def until(self, done: Any, seconds: float = START) -> None:
        """Listen until something holds.

        Raises:
            BrokenPromiseError: It does not hold though nobody has made progress for this time, or a process has failed.
        """
        deadline = time.monotonic() + seconds
        while not done():
            self._tend()
            try:
                host, kind, said = self.heard.get(timeout=0.1)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise self.broken(f"nothing for {seconds:g} s.\n{self._state()}") from None
                continue
            if self.hosts.get(host.host) is host:
                deadline = time.monotonic() + seconds
                if kind == "failed":
                    raise self.broken(f"host {host.host} failed: {said}", host)
            host.last[kind] = said

    def broken(self, text: str, host: Host | None = None) -> BrokenPromiseError:
        """An error about this job, with what a process has written to standard error."""
        return BrokenPromiseError(f"{self.name}: {text}" + (f"\n{host.tail()}" if host else ""))

    def freeze(self, host: Host, seconds: float) -> None:
        """Freeze a process for a time, which begins again if it is frozen already."""
        host.signal(signal.SIGSTOP)
        self._thawing = [entry for entry in self._thawing if entry[1] is not host]
        self._thawing.append((time.monotonic() + seconds, host))

    def lose(self, victim: Host, fault: Fault) -> None:
        """Kill or stop a process, or freeze it until it counts as dead."""
        if fault.kind == "long freeze":
            self.freeze(victim, LONG_FREEZE)
        else:
            victim.signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
            self.until(lambda: victim.gone)

    def _tend(self) -> None:
        """Let frozen processes go on, and read vitals twice a second, while all are at work."""
        now = time.monotonic()
        for entry in [entry for entry in self._thawing if entry[0] <= now]:
            self._thawing.remove(entry)
            entry[1].signal(signal.SIGCONT)
        if now >= self._read_at and self.step and all(host.at_work for host in self.hosts.values()):
            self._read_at = now + 0.5
            for host in self.hosts.values():
                host.vitals.read(host.process.pid)

    def _state(self) -> str:
        for host in self.hosts.values():
            host.abort()
        return "\n".join(
            f"host {host.host}: said {host.last}, exit code {host.process.poll()}\n{host.tail()}"
            for host in self.hosts.values()
        )
