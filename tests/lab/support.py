"""What several of the lab's tests need."""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

from gradwire.lab import LabResult

TRAFFIC = [sys.executable, "-I", "-S", str(Path(__file__).with_name("traffic.py"))]


def printed(result: LabResult, host: int = 0) -> dict[str, Any]:
    """The JSON that a host of a successful run printed."""
    value: dict[str, Any] = json.loads(result.check().hosts[host].stdout)
    return value


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def namespace(pid: int) -> str:
    """Network namespace of a process, as the kernel names it."""
    return os.readlink(f"/proc/{pid}/ns/net")


def members(links: set[str]) -> list[int]:
    """Processes that are in one of these namespaces."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if namespace(int(entry)) in links:
                    found.append(int(entry))
            except OSError:
                continue
    return found


class Watch:
    """Notices the end of processes that are not ours to wait for."""

    def __init__(self, pids: list[int]) -> None:
        self.links = {namespace(pid) for pid in pids} - {namespace(os.getpid())}
        self._fds = [os.pidfd_open(pid) for pid in pids]

    def assert_all_ended(self, seconds: float = 20.0) -> None:
        """Fails unless all of them end, and nothing else is left in their namespaces."""
        try:
            for fd in self._fds:
                assert select.select([fd], [], [], seconds)[0], "a process outlived the lab"
        finally:
            for fd in self._fds:
                os.close(fd)
        assert members(self.links) == []
