"""Start the ranks of a job, in the lab or on loopback. No process outlives the job."""

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
from gradwire.lab.runner import END_AFTER_S, Runner, signal_group
from gradwire.lab.units import parse_rate

_GRACE_SECONDS = 5.0
_TAIL_LINES = 15
_RANK_VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}  # one thread per rank: ranks share the cores

OnMessage = Callable[[Message], None]


@dataclass(frozen=True)
class ServerProcess:
    """A further process, such as a server, which ends when the ranks end. In the lab it gets its own host.

    Attributes:
        command: Command line. ``{host}`` is replaced by the address of its host.
        variables: Environment variables of all processes, with the same replacement.
        link: Rate of its host's link in the lab, over that of the ranks.
    """

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    link: float = 1.0

    def at(self, host: str) -> ServerProcess:
        """The same process with the address filled in."""
        command = [word.replace("{host}", host) for word in self.command]
        variables = {name: value.replace("{host}", host) for name, value in self.variables.items()}
        return replace(self, command=command, variables=variables)


class RanksError(GradwireError, RuntimeError):
    """A rank of a benchmark failed. The message has the last lines of the first one that failed."""


def launch(
    job: BenchmarkJob,
    world_size: int,
    on_message: OnMessage = lambda _: None,
    *,
    lab: bool = False,
    module: str = "gradwire.bench.worker",
    server: ServerProcess | None = None,
) -> list[SegmentOutcome]:
    """Run a job to its end.

    Args:
        job: Job to run. `folder`, `init_method` and `shaped` are filled in here.
        world_size: Number of ranks.
        on_message: Called with each message of a rank.
        lab: Whether to run in a network lab, with one host per rank and the rates that the job asks for.
        module: Module that each rank runs. A module of your own calls `gradwire.bench.worker.main` with a function that
            runs segments.
        server: Further process to run.

    Returns:
        The outcomes of all segments on all ranks, in any order.

    Raises:
        RanksError: A rank failed, or the deadline passed.
        RightsError: The lab cannot run here.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        init_method = "env://" if lab else f"file://{folder}/rendezvous"
        job = replace(job, folder=folder, init_method=init_method, shaped=lab)
        command = [sys.executable, "-m", module, str(job.save())]
        listener = _Listener(Path(folder), on_message)
        if lab:
            _run_in_lab(command, world_size, job, listener, server)
        else:
            _run_on_loopback(command, world_size, job, listener, server and server.at("127.0.0.1"))
    expected = world_size * len(job.segments)
    if len(listener.outcomes) != expected:
        raise RanksError(f"The ranks reported {len(listener.outcomes)} of {expected} results. Run the benchmark again.")
    return listener.outcomes


class _Listener:
    """Handles the lines of ranks: sets rates on request, keeps outcomes, and passes on all messages."""

    def __init__(self, folder: Path, on_message: OnMessage) -> None:
        self.outcomes: list[SegmentOutcome] = []
        self.lab: Lab | None = None
        self.server: tuple[int, float] | None = None  # its host, and its link over that of the ranks
        self._folder = folder
        self._on_message = on_message

    def __call__(self, rank: int, stream: str, line: str) -> None:
        message = from_line(line) if stream == "stdout" else None
        if message is None:
            return
        if isinstance(message, RateRequest):
            assert self.lab is not None, "ranks ask for rates only in a lab"
            self._set_rate(self.lab, message.rate)
            (self._folder / f"rate-{message.ticket}").touch()
        if isinstance(message, SegmentOutcome):
            self.outcomes.append(message)
        self._on_message(message)

    def _set_rate(self, lab: Lab, rate: str | None) -> None:
        lab.set_rate(rate)
        bits = parse_rate(rate)
        if self.server is not None and bits is not None:
            host, link = self.server
            lab.set_rate(link * bits, host)


def _run_in_lab(
    command: list[str], world_size: int, job: BenchmarkJob, listener: _Listener, server: ServerProcess | None
) -> None:
    with Lab(world_size + (server is not None)) as lab:
        listener.lab = lab
        placed = ServerProcess([]) if server is None else server.at(lab.addresses[world_size])
        listener.server = None if server is None else (world_size, server.link)
        result = lab.run(
            lambda host: command if host < world_size else placed.command,
            # Not this process's own variables: the lab passes them on, and overrides those of a rendezvous.
            env={**_RANK_VARIABLES, **placed.variables, "WORLD_SIZE": str(world_size)},
            timeout=job.deadline_seconds,
            grace=_GRACE_SECONDS,
            capture=False,
            on_line=listener,
        )
    if not result.ok:
        stderr = result.hosts[result.first_failed or 0].stderr
        raise RanksError(f"A rank failed. {result.message}\n{_tail(stderr)}".rstrip())


def _run_on_loopback(
    command: list[str], world_size: int, job: BenchmarkJob, listener: _Listener, server: ServerProcess | None
) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    commands, more = [command] * world_size, {} if server is None else server.variables
    try:
        for rank, line in enumerate(commands if server is None else [*commands, list(server.command)]):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
            processes.append(
                subprocess.Popen(
                    line,
                    env={**os.environ, **_RANK_VARIABLES, **_loopback_interface(), **more, **variables},
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
            process.wait(END_AFTER_S)
    _check_ended(runner)


def _check_ended(runner: Runner) -> None:
    if not runner.timed_out and all(job.process.returncode == 0 for job in runner.jobs):
        return
    failed = runner.jobs[runner.first_failed or 0]
    what = "The time limit was reached." if runner.timed_out else f"Rank {failed.host} failed first."
    raise RanksError(f"{what}\n{_tail(failed.output('stderr'))}".rstrip())


def _loopback_interface() -> dict[str, str]:
    # Otherwise Gloo resolves the host name, which fails on machines that do not know their own.
    return {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
