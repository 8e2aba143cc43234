"""The lab's end of the keeper process: start it, enter its namespaces, close it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from gradwire.core.errors import RightsError
from gradwire.lab.errors import LabError
from gradwire.lab.rights import find_tool, refusal, tool_failure

_CLOSE_TIMEOUT_S = 20.0
_TOOL_TIMEOUT_S = 60.0


class Namespaces:
    """One network namespace per host and one for the bridge, held by a keeper process.

    Args:
        num_hosts: Number of hosts.

    Raises:
        RightsError: The system does not permit namespaces, or `nsenter` is missing.
    """

    def __init__(self, num_hosts: int) -> None:
        if not sys.platform.startswith("linux"):
            raise RightsError(
                f"A lab needs the network namespaces of Linux, not {sys.platform}. Run it in a Linux virtual machine."
            )
        self._nsenter = find_tool("nsenter")
        self._keeper = _start_keeper(num_hosts)
        line = _first_line(self._keeper)
        report = _read_report(line)
        if report is None or "step" in report:
            self.close()
            if report is None:
                raise LabError(f"The keeper process did not report its namespaces, but {line!r}. Please report this.")
            raise refusal(report["step"], report["reason"])
        self._own_user: bool = report["own_user"]
        self._fds: list[int] = report["fds"]

    @property
    def keeper_pid(self) -> int:
        """Process id of the keeper."""
        return self._keeper.pid

    @property
    def is_held(self) -> bool:
        """Whether the keeper is alive."""
        return self._keeper.poll() is None

    def path(self, host: int | None) -> str:
        """File of a host's namespace, or of the bridge's if host is None."""
        name = "ns/net" if host is None else f"fd/{self._fds[host]}"
        return f"/proc/{self.keeper_pid}/{name}"

    def entered(self, host: int | None, command: list[str]) -> list[str]:
        """Prefix a command to run in a namespace. It keeps its process id, because nsenter does not fork."""
        user = [f"--user=/proc/{self.keeper_pid}/ns/user", "--preserve-credentials"] if self._own_user else []
        return [self._nsenter, *user, f"--net={self.path(host)}", "--", *command]

    def tool(self, host: int | None, command: list[str], script: str | None = None) -> str:
        """Run a system tool in a namespace and return its output.

        Args:
            host: Index of the host; None for the bridge.
            command: Tool and arguments. The tool is looked up on the system's path.
            script: Standard input, for tools that read a batch.

        Raises:
            LabError: The tool failed.
        """
        command = [find_tool(command[0]) if "/" not in command[0] else command[0], *command[1:]]
        try:
            done = subprocess.run(
                self.entered(host, command), input=script, capture_output=True, text=True, check=False,
                timeout=_TOOL_TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise tool_failure(command, f"no end after {_TOOL_TIMEOUT_S:g} s", script) from error
        if done.returncode != 0:
            raise tool_failure(command, done.stderr or done.stdout or f"exit code {done.returncode}", script)
        return done.stdout

    def net_dev(self) -> str:
        """`/proc/net/dev` of the bridge's namespace."""
        return Path(f"/proc/{self.keeper_pid}/net/dev").read_text()

    def close(self) -> None:
        """Kill what runs in the namespaces and let the kernel destroy them. May be called again."""
        if self._keeper.stdin and not self._keeper.stdin.closed:
            # A byte in addition to the end of file, which a forked child of this process would hold back.
            with contextlib.suppress(BrokenPipeError), self._keeper.stdin as pipe:
                pipe.write(b".")
        try:
            self._keeper.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait(_CLOSE_TIMEOUT_S)
        if self._keeper.stdout:
            self._keeper.stdout.close()


def _start_keeper(num_hosts: int) -> subprocess.Popen[bytes]:
    script = str(Path(__file__).with_name("keeper.py"))
    lab_fd = os.pidfd_open(os.getpid())
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", script, str(lab_fd), str(num_hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(lab_fd,),
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(lab_fd)


def _first_line(process: subprocess.Popen[bytes]) -> str:
    """Return what a process says first, in one write; nothing if it takes too long."""
    assert process.stdout is not None, "its output is a pipe"
    ready, _, _ = select.select([process.stdout], [], [], _TOOL_TIMEOUT_S)
    return process.stdout.readline().decode() if ready else ""


def _read_report(line: str) -> dict[str, Any] | None:
    try:
        report = json.loads(line)
    except ValueError:
        return None
    return report if isinstance(report, dict) else None
