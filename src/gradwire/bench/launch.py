"""Starts the ranks of a job, in the lab or on loopback, and sees to it that none outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gradwire.bench.job import BenchmarkJob, Message, RateRequest, SegmentOutcome, from_line
from gradwire.core.errors import GradwireError
from gradwire.lab import Lab
from gradwire.lab.runner import Runner, signal_group

_GRACE_SECONDS = 5.0
_LAST_WORDS = 15

OnMessage = Callable[[Message], None]


@dataclass(frozen=True)
class Beside:
    """A process beside the ranks, such as a server, in the lab on a host of its own. It ends when the ranks do.

    Attributes:
        command: command line; ``{host}`` in it stands for the address of that host.
        variables: of the environment of all, likewise.
    """

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)

    def at(self, host: str) -> Beside:
        """With an address filled in."""
        command = [word.replace("{host}", host) for word in self.command]
        return Beside(command, {name: value.replace("{host}", host) for name, value in self.variables.items()})


class RanksError(GradwireError, RuntimeError):
    """The ranks of a benchmark did not all end well; the message has the last lines of the first that failed."""


def launch(
    job: BenchmarkJob,
    world_size: int,
    on_message: OnMessage = lambda _: None,
    *,
    lab: bool = False,
    module: str = "gradwire.bench.worker",
    beside: Beside | None = None,
) -> list[SegmentOutcome]:
    """Run a job to its end.

    Args:
        job: what to run; `folder` and `init_method` are filled in here.
        world_size: how many ranks.
        on_message: called with what the ranks say, as they say it.
        lab: one host a rank in a network lab of its own, with rates as the job asks for them.
        module: what each rank runs; one of your own calls `gradwire.bench.worker.main` with how it runs segments.
        beside: what runs beside the ranks.

    Returns:
        What each rank said of each segment, in any order.

    Raises:
        RanksError: a rank failed, or the deadline was reached.
        RightsError: the lab cannot run here.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        init_method = "env://" if lab else f"file://{folder}/rendezvous"
        job = replace(job, folder=folder, init_method=init_method, shaped=lab)
        command = [sys.executable, "-m", module, str(job.save())]
        listener = _Listener(Path(folder), on_message)
        if lab:
            _run_in_lab(command, world_size, job, listener, beside)
        else:
            _run_on_loopback(command, world_size, job, listener, beside and beside.at("127.0.0.1"))
    expected = world_size * len(job.segments)
    if len(listener.outcomes) != expected:
        raise RanksError(f"Expected {expected} results of the ranks, got {len(listener.outcomes)}. Do: run it again.")
    return listener.outcomes


class _Listener:
    """Takes the ranks' lines: answers requests for a rate, keeps outcomes, hands everything on."""

    def __init__(self, folder: Path, on_message: OnMessage) -> None:
        self.outcomes: list[SegmentOutcome] = []
        self.lab: Lab | None = None
        self._folder = folder
        self._on_message = on_message

    def __call__(self, rank: int, stream: str, line: str) -> None:
        message = from_line(line) if stream == "stdout" else None
        if message is None:
            return
        if isinstance(message, RateRequest):
            assert self.lab is not None, "ranks ask for rates in a lab alone"
            self.lab.set_rate(message.rate)
            (self._folder / f"rate-{message.ticket}").touch()
        if isinstance(message, SegmentOutcome):
            self.outcomes.append(message)
        self._on_message(message)


def _run_in_lab(
    command: list[str], world_size: int, job: BenchmarkJob, listener: _Listener, beside: Beside | None
) -> None:
    with Lab(world_size + (beside is not None)) as lab:
        listener.lab = lab
        placed = Beside([]) if beside is None else beside.at(lab.addresses[world_size])
        result = lab.run(
            lambda host: command if host < world_size else placed.command,
            env={**_environment(), **placed.variables, "WORLD_SIZE": str(world_size)},
            timeout=job.deadline_seconds,
            grace=_GRACE_SECONDS,
            capture=False,
            on_line=listener,
        )
    if not result.ok:
        stderr = result.hosts[result.first_failed or 0].stderr
        raise RanksError(f"Expected all ranks to end well. {result.message}\n{_tail(stderr)}".rstrip())


def _run_on_loopback(
    command: list[str], world_size: int, job: BenchmarkJob, listener: _Listener, beside: Beside | None
) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    commands, more = [command] * world_size, {} if beside is None else beside.variables
    try:
        for rank, line in enumerate(commands if beside is None else [*commands, list(beside.command)]):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
            processes.append(
                subprocess.Popen(
                    line,
                    env={**_environment(), **_loopback_interface(), **more, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            )
        runner = Runner(
            processes,
            timeout_s=job.deadline_seconds,
            grace_s=_GRACE_SECONDS,
            capture=False,
            on_line=listener,
        )
        runner.run()
    finally:
        for process in processes:
            signal_group(process, 9)
            process.wait()
    _check_ended(runner)


def _check_ended(runner: Runner) -> None:
    if all(job.process.returncode == 0 for job in runner.jobs):
        return
    failed = runner.jobs[runner.first_failed or 0]
    what = "The time limit was reached." if runner.timed_out else f"Rank {failed.host} failed first."
    raise RanksError(f"Expected all ranks to end well. {what}\n{_tail(failed.output('stderr'))}".rstrip())


def _environment() -> dict[str, str]:
    """The environment of this process, with one thread a rank: more of them would fight over the same cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _loopback_interface() -> dict[str, str]:
    # Without it Gloo looks the host's name up, which fails on machines that do not know their own.
    return {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_LAST_WORDS:])
