"""Results of a run in the lab: exit codes, output, traffic, and the host that failed first."""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.lab.counters import Drops, InterfaceCounters
from gradwire.lab.errors import LabError


@dataclass(frozen=True)
class HostResult:
    """Result of one host's command.

    Attributes:
        host: Index of the host.
        returncode: Exit code; minus the signal's number if a signal ended the command.
        seconds: Time that the command ran.
        stdout: Standard output; empty if output was not captured.
        stderr: Standard error; its last lines if output was not captured.
        counters: Traffic of the host's interface during the run.
        drops: Packets that the host lost during the run.
        ended_by_lab: Whether the lab ended the command because another host failed or the time was up.
    """

    host: int
    returncode: int
    seconds: float
    stdout: str
    stderr: str
    counters: InterfaceCounters
    drops: Drops
    ended_by_lab: bool

    @property
    def outcome(self) -> str:
        """The exit code in words."""
        if self.returncode >= 0:
            return f"exit code {self.returncode}"
        return f"signal {signal.Signals(-self.returncode).name}"


@dataclass(frozen=True)
class LabResult:
    """Result of a run on all hosts.

    Attributes:
        hosts: Result of each host, in order.
        seconds: Time from the first start to the last end.
        first_failed: First host that failed by itself, or None.
        timed_out: Whether the time limit ended the run.
    """

    hosts: tuple[HostResult, ...]
    seconds: float
    first_failed: int | None
    timed_out: bool

    @property
    def ok(self) -> bool:
        """Whether every command ended with exit code 0, within the time limit."""
        return not self.timed_out and all(host.returncode == 0 for host in self.hosts)

    @property
    def exit_code(self) -> int:
        """Exit code for a shell: that of the first failed host, 128 plus its signal, or 124 for the time limit."""
        if self.ok:
            return 0
        if self.first_failed is None:
            return 124 if self.timed_out else 1
        code = self.hosts[self.first_failed].returncode
        return code if code > 0 else 128 - code

    @property
    def message(self) -> str:
        """What happened, in a sentence or two."""
        if self.ok:
            return f"All {len(self.hosts)} hosts ended with exit code 0 after {self.seconds:.1f} s."
        ended = [str(host.host) for host in self.hosts if host.ended_by_lab]
        parts = []
        if self.first_failed is not None:
            failed = self.hosts[self.first_failed]
            parts.append(f"Host {failed.host} failed first: {failed.outcome} after {failed.seconds:.1f} s.")
        if self.timed_out:
            parts.append(f"The time limit was reached after {self.seconds:.1f} s.")
        if ended:
            parts.append(f"The lab ended the commands of host {', '.join(ended)}.")
        return " ".join(parts)

    def check(self) -> LabResult:
        """Return the result if every command succeeded.

        Raises:
            LabError: A command failed. The message ends with the last output of the first failed host.
        """
        if self.ok:
            return self
        failed = self.hosts[self.first_failed or 0]
        tail = "\n".join((failed.stderr or failed.stdout).splitlines()[-20:])
        raise LabError(f"A command in the lab failed. {self.message}\n{tail}".rstrip())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the output."""
        hosts = []
        for host in self.hosts:
            row = asdict(host)
            for name in ("stdout", "stderr"):
                del row[name]
            hosts.append({**row.pop("counters"), **row})
        return {
            "ok": self.ok,
            "message": self.message,
            "seconds": self.seconds,
            "first_failed": self.first_failed,
            "timed_out": self.timed_out,
            "hosts": hosts,
        }
