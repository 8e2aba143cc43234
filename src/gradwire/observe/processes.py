"""Which process wrote a status, and whether it still lives: from /proc where there is one, else by its number alone.

A process number means something on one machine and in one PID namespace only, and is used again. So an identity also
has the machine's current boot, the namespace, and the start time of the process.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ProcessState = Literal["alive", "stopped", "gone", "unknown"]
_PROC = Path("/proc")
_MAX_NUMBER = 1 << 31


@dataclass(frozen=True)
class ProcessIdentity:
    """A process.

    Attributes:
        machine: Boot and PID namespace. Process numbers can be compared where it is the same.
        number: Process number.
        started: Start time in clock ticks since the boot; 0 if unknown.
    """

    machine: str
    number: int
    started: int = 0

    @classmethod
    def current(cls) -> ProcessIdentity:
        """The calling process."""
        return cls(this_machine(), os.getpid(), _stat(os.getpid())[1])

    def state(self) -> ProcessState:
        """Whether the process runs, is stopped (SIGSTOP, a debugger), or is gone. Unknown on another machine."""
        if self.machine != this_machine() or not 0 < self.number < _MAX_NUMBER:
            return "unknown"
        letter, started = _stat(self.number)
        if not letter:
            return "alive" if _exists(self.number) else "gone"
        if letter in "ZX" or (self.started and started != self.started):
            return "gone"
        return "stopped" if letter in "Tt" else "alive"


def this_machine() -> str:
    """Return the name of what process numbers belong to here: the boot and the PID namespace, else the host."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _stat(number: int) -> tuple[str, int]:
    """Return the state's letter and the start time of a process; no letter if /proc does not tell."""
    try:
        text = (_PROC / str(number) / "stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()  # the name before it may have spaces and parentheses
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


def _exists(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True
