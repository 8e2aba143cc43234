"""The lab: hosts on one machine with their own network of a chosen rate, loss and delay.

Guarantees: hosts neither see nor touch the machine's own network. Labs never collide. When the lab is closed or its
process ends in any way, every process of its hosts is killed and the network is gone.

Only the network is isolated: hosts share file system, processors, memory and process ids. Without root, commands run as
root of a user namespace, with the rights of the user who started the lab.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

from gradwire.core.errors import GradwireError, OptionError
from gradwire.lab.counters import Drops, InterfaceCounters
from gradwire.lab.errors import LabError
from gradwire.lab.namespaces import Namespaces
from gradwire.lab.network import INTERFACE, Network, address
from gradwire.lab.results import HostResult, LabResult
from gradwire.lab.rights import find_tool
from gradwire.lab.runner import END_AFTER_S, OnLine, Runner, signal_group
from gradwire.lab.units import format_rate, parse_delay, parse_loss, parse_queue, parse_rate, seconds

MAX_HOSTS = 250
MASTER_PORT = 29500
"""Port of torch's rendezvous. Every lab has its own network, so all use the same port."""

Command = Sequence[str] | Callable[[int], Sequence[str]]
"""A command line for every host, or a function from host to command line."""


class Lab:
    """A network of hosts on this machine. Use it as a context manager.

    Args:
        hosts: Number of hosts, 1 to 250.
        rate: Rate of each host's uplink and downlink, in tc's notation (``"100mbit"``); None for no shaping.
        loss: Fraction of packets that each host drops on arrival, such as ``"0.1%"`` or 0.001.
        delay: One-way delay of each uplink, such as ``"5ms"``. Needs a kernel with netem.
        queue: Bytes that may wait at the switch for each host, such as ``"64kib"``; more packets are dropped. None
            means 50 ms of the rate, but at least 1,000 frames. Needs a rate.

    Raises:
        OptionError: An argument is out of range.
        RightsError: There is neither root nor user namespaces, or a tool is missing. The message says what to install.
        LabError: The kernel lacks a feature.

    Example:
        >>> with Lab(hosts=4, rate="100mbit") as lab:
        ...     result = lab.run([sys.executable, "train.py"], timeout=60).check()
        ...     print(result.hosts[0].stdout, result.hosts[0].counters.bytes_sent)
    """

    def __init__(
        self,
        hosts: int = 2,
        rate: str | float | None = None,
        *,
        loss: str | float | None = 0.0,
        delay: str | timedelta | None = None,
        queue: str | int | None = None,
    ) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise OptionError(f"A lab cannot have {hosts} hosts. Pass 1 to {MAX_HOSTS}.")
        rate_bits, loss_fraction, one_way = parse_rate(rate), parse_loss(loss), parse_delay(delay)
        queue_limit = parse_queue(queue)
        if queue_limit is not None and rate_bits is None:
            raise OptionError(f"A queue of {queue} needs a rate: links without shaping have none. Pass rate='100mbit'.")
        for tool in ("ip", "tc", "bridge"):
            find_tool(tool)
        self.num_hosts = hosts
        self._processes: list[subprocess.Popen[bytes]] = []
        self._namespaces = Namespaces(hosts)
        try:
            self._network = Network(self._namespaces, hosts, delay=one_way, loss=loss_fraction, queue=queue_limit)
            self._network.set_rate(rate_bits, range(hosts))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """IPv4 address of each host."""
        return tuple(address(host) for host in range(self.num_hosts))

    @property
    def rates(self) -> tuple[int | None, ...]:
        """Rate of each host's links in bits per second; None if not shaped."""
        return self._network.rates

    def run(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
        grace: float | timedelta = 10.0,
        capture: bool = True,
        on_line: OnLine | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> LabResult:
        """Run a command on every host at once and wait for all of them.

        Args:
            command: Command line, or a function from host to command line.
            env: Variables to add to those of `environment`.
            timeout: Seconds after which the commands are ended; None for no limit.
            grace: Seconds that the other hosts may continue after one has failed.
            capture: Whether the result keeps all output, instead of the last lines of standard error.
            on_line: Called with host, ``"stdout"`` or ``"stderr"``, and each line as it arrives.
            cwd: Working directory.

        Returns:
            The result, which may be a failure: `LabResult.check` raises in that case.

        Raises:
            LabError: The lab is closed, or its keeper was killed.
            FileNotFoundError: There is no folder `cwd`. A command that does not exist ends with exit code 127.
        """
        processes: list[subprocess.Popen[bytes]] = []
        counters, drops = self.counters(), self.drops()
        try:
            for host in range(self.num_hosts):
                line = command(host) if callable(command) else command
                pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
                processes.append(self.popen(line, host, env=env, cwd=cwd, **pipes))
            runner = Runner(
                processes,
                timeout_s=seconds(timeout),
                grace_s=seconds(grace) or 0.0,
                capture=capture,
                on_line=on_line,
            )
            runner.run()
        finally:
            self._end(processes)
            for pipe in (pipe for process in processes for pipe in (process.stdout, process.stderr) if pipe):
                pipe.close()
        return self._result(runner, counters, drops)

    def popen(
        self, command: Sequence[str], host: int = 0, *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command on one host and return at once.

        The process is the command itself without a wrapper, so its `pid` can be killed. It leads its own session and
        process group. The lab kills it at the end.

        Args:
            command: Command line.
            host: Index of the host.
            env: Variables to add to those of `environment`.
            **options: Options of `subprocess.Popen`.
        """
        self._check_open()
        self._check_host(host)
        process: subprocess.Popen[bytes] = subprocess.Popen(
            self._namespaces.entered(host, list(command)),
            env={**self.environment(host), **(env or {})},
            start_new_session=True,
            **{"stdin": subprocess.DEVNULL, **options},
        )
        self._processes = [known for known in self._processes if known.returncode is None]
        self._processes.append(process)
        return process

    def environment(self, host: int) -> dict[str, str]:
        """Environment of a host's commands: this process's own, torch's rendezvous, and the facts of the lab."""
        # Unlike a cluster, the hosts share this machine's processors.
        threads = str(max(1, (os.cpu_count() or 1) // self.num_hosts))
        return {
            "OMP_NUM_THREADS": threads,
            # Lines appear when they are printed, and survive a process that is killed.
            "PYTHONUNBUFFERED": "1",
            **os.environ,
            "GRADWIRE_LAB_HOST": str(host),
            "GRADWIRE_LAB_HOSTS": str(self.num_hosts),
            "GRADWIRE_LAB_RATE": format_rate(self.rates[host]),
            "GRADWIRE_LAB_INTERFACE": INTERFACE,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "RANK": str(host),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.num_hosts),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(MASTER_PORT),
        }

    def counters(self) -> tuple[InterfaceCounters, ...]:
        """Bytes and packets of each host's interface since the lab was built. Cheap: reads one file."""
        self._check_open()
        return self._network.counters()

    def drops(self) -> tuple[Drops, ...]:
        """Packets that each host has lost since the lab was built, by cause. Runs tools on each host."""
        self._check_open()
        return self._network.drops()

    def set_rate(self, rate: str | float | None, host: int | None = None) -> None:
        """Change the rate of links while commands run.

        Args:
            rate: New rate, as in the constructor.
            host: Host whose links change; None for all hosts.
        """
        self._check_open()
        if host is not None:
            self._check_host(host)
        hosts = range(self.num_hosts) if host is None else range(host, host + 1)
        self._network.set_rate(parse_rate(rate), hosts)

    def receive_by_napi(self, host: int) -> None:
        """Let the bridge receive by NAPI what a host sends: its XDP programs need that to send in native mode."""
        self._check_open()
        self._check_host(host)
        self._network.receive_by_napi(host)

    def close(self) -> None:
        """Kill everything that runs on the hosts and take the network down. May be called again."""
        self._end(self._processes)
        self._namespaces.close()

    def _check_open(self) -> None:
        if not self._namespaces.is_held:
            raise LabError("This lab is closed, or its keeper process was killed. Make a new one.")

    def _check_host(self, host: int) -> None:
        if not 0 <= host < self.num_hosts:
            raise OptionError(f"There is no host {host}. Hosts are 0 to {self.num_hosts - 1}.")

    def _end(self, processes: list[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            signal_group(process, signal.SIGKILL)
        for process in processes:
            process.wait(END_AFTER_S)

    def _result(self, runner: Runner, counters: tuple[InterfaceCounters, ...], drops: tuple[Drops, ...]) -> LabResult:
        counters_now, drops_now = self.counters(), self.drops()
        hosts = tuple(
            HostResult(
                host=job.host,
                returncode=job.process.returncode,
                seconds=job.seconds,
                stdout=job.output("stdout"),
                stderr=job.output("stderr"),
                counters=counters_now[job.host] - counters[job.host],
                drops=drops_now[job.host] - drops[job.host],
                ended_by_lab=job.ended_by_lab,
            )
            for job in runner.jobs
        )
        return LabResult(hosts, runner.seconds, runner.first_failed, runner.timed_out)


@functools.cache
def available(*, delay: bool = False) -> str | None:
    """Return why a lab cannot run here, or None if it can. Builds a small lab to find out.

    Args:
        delay: Whether a delay is needed, which takes another kernel module.
    """
    try:
        with Lab(hosts=1, rate="1gbit", delay="1ms" if delay else None):
            return None
    except GradwireError as error:
        return str(error)
