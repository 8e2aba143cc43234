"""Runs processes to their end: reads their output, keeps the time, and ends the others when one fails.

One thread waits on one selector over pipes and pidfds, so that an interrupt arrives only between two events.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

OnLine = Callable[[int, str, str], None]
"""Called with host, ``"stdout"`` or ``"stderr"``, and a line without its newline."""

KILL_AFTER_S = 3.0
"""Seconds between SIGTERM and SIGKILL."""
END_AFTER_S = 20.0
"""Seconds that the kernel may take to end a killed process."""
_TAIL_LINES = 20
_CHUNK_BYTES = 1 << 16
_WAKE_S = 60.0


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the process group that a process leads."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


@dataclass
class _Stream:
    """The lines of one pipe, all of them or the last ones."""

    host: int
    name: str
    pipe: IO[bytes]
    lines: deque[str]
    on_line: OnLine | None
    rest: bytes = b""

    def read(self) -> bool:
        """Read what is available. Returns False at the end of the stream."""
        try:
            chunk = os.read(self.pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return True
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        if not chunk and self.rest:
            lines, self.rest = [self.rest], b""
        for line in lines:
            self._take(line.decode(errors="replace"))
        return bool(chunk)

    def drain(self) -> None:
        """Read what an ended process left in the pipe. Its children may still hold the other end."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.pipe.fileno(), _CHUNK_BYTES):
                self.rest += chunk
        *lines, last = self.rest.split(b"\n")
        for line in [*lines, last] if last else lines:
            self._take(line.decode(errors="replace"))
        self.rest = b""

    def _take(self, line: str) -> None:
        self.lines.append(line)
        if self.on_line:
            self.on_line(self.host, self.name, line)


@dataclass
class LabCommand:
    """One host's process with its output and times."""

    host: int
    process: subprocess.Popen[bytes]
    started: float
    streams: dict[str, _Stream] = field(default_factory=dict)
    seconds: float = 0.0
    ended_by_lab: bool = False

    def output(self, name: str) -> str:
        """Text kept of a stream."""
        return "".join(f"{line}\n" for line in self.streams[name].lines)


class Runner:
    """Waits for processes with piped output, one per host.

    Args:
        processes: Process of each host. Each leads its own process group and has pipes for output.
        timeout_s: Time limit for all processes, or None.
        grace_s: Seconds that the others may continue after one has failed.
        capture: Whether to keep all output, instead of the last lines of standard error.
        on_line: Called for each line of output.
    """

    def __init__(
        self,
        processes: list[subprocess.Popen[bytes]],
        *,
        timeout_s: float | None,
        grace_s: float,
        capture: bool,
        on_line: OnLine | None,
    ) -> None:
        self.first_failed: int | None = None
        self.timed_out = False
        self._started = time.monotonic()
        self._limit = None if timeout_s is None else self._started + timeout_s
        self._term_at = self._limit
        self._kill_at: float | None = None
        self._grace_s = grace_s
        self._selector = selectors.DefaultSelector()
        self.jobs = [LabCommand(host, process, self._started) for host, process in enumerate(processes)]
        self._running = list(self.jobs)
        for job in self.jobs:
            self._watch(job, capture=capture, on_line=on_line)

    def run(self) -> None:
        """Run until every process has ended. An interrupt ends the processes and is raised again."""
        try:
            self._loop()
        except BaseException:
            self._terminate()
            self._loop()
            raise
        finally:
            self._close()

    @property
    def seconds(self) -> float:
        """Time from the start to the last end."""
        return max(job.seconds for job in self.jobs)

    def _watch(self, job: LabCommand, *, capture: bool, on_line: OnLine | None) -> None:
        self._selector.register(os.pidfd_open(job.process.pid), selectors.EVENT_READ, job)
        for name, pipe in (("stdout", job.process.stdout), ("stderr", job.process.stderr)):
            assert pipe is not None, "a process without pipes cannot be watched"
            os.set_blocking(pipe.fileno(), False)
            kept = None if capture else (_TAIL_LINES if name == "stderr" else 0)
            job.streams[name] = _Stream(job.host, name, pipe, deque(maxlen=kept), on_line)
            self._selector.register(pipe, selectors.EVENT_READ, job.streams[name])

    def _loop(self) -> None:
        while self._running:
            due = self._kill_at if self._kill_at is not None else self._term_at
            wait = _WAKE_S if due is None else min(_WAKE_S, max(0.0, due - time.monotonic()))
            # Streams before ends: an end reads the rest of its streams and unregisters them.
            events = sorted(self._selector.select(wait), key=lambda event: isinstance(event[0].data, LabCommand))
            for key, _ in events:
                if isinstance(key.data, LabCommand):
                    self._ended(key.data, key.fd)
                elif not key.data.read():
                    self._selector.unregister(key.fileobj)
            if self._running and due is not None and time.monotonic() >= due:
                self._deadline()

    def _ended(self, job: LabCommand, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        code = job.process.wait(END_AFTER_S)  # it has ended
        job.seconds = time.monotonic() - self._started
        self._running.remove(job)
        for stream in job.streams.values():
            if stream.pipe in self._selector.get_map():
                self._selector.unregister(stream.pipe)
                stream.drain()
        if code != 0 and not job.ended_by_lab and self.first_failed is None:
            self.first_failed = job.host
            grace_end = time.monotonic() + self._grace_s
            self._term_at = grace_end if self._term_at is None else min(self._term_at, grace_end)

    def _deadline(self) -> None:
        if self._kill_at is None:
            self.timed_out = self._limit is not None and time.monotonic() >= self._limit
            self._terminate()
        else:
            self._kill_at = None
            self._term_at = None
            for job in self._running:
                signal_group(job.process, signal.SIGKILL)

    def _terminate(self) -> None:
        self._kill_at = time.monotonic() + KILL_AFTER_S
        for job in self._running:
            job.ended_by_lab = True
            signal_group(job.process, signal.SIGTERM)

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, LabCommand):
                os.close(key.fd)
        self._selector.close()
        for job in self.jobs:
            for stream in job.streams.values():
                stream.pipe.close()
