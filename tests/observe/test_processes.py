"""Whether a process lives, by real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gradwire.observe import processes
from gradwire.observe.processes import ProcessIdentity


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process, ProcessIdentity(processes.this_machine(), process.pid, processes._stat(process.pid)[1])
        process.kill()


def test_this_process_is_alive() -> None:
    own = ProcessIdentity.current()
    assert own.number == os.getpid() and own.started > 0
    assert own.state() == "alive"


def test_a_stopped_process_is_told_from_one_that_is_gone(
    child: tuple[subprocess.Popen[bytes], ProcessIdentity],
) -> None:
    process, identity = child
    assert identity.state() == "alive"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert identity.state() == "stopped"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identity.state() == "gone", "a zombie is"
    process.wait()
    assert identity.state() == "gone"


def test_another_process_with_the_same_number_is_another_process() -> None:
    assert replace(ProcessIdentity.current(), started=1).state() == "gone"


@pytest.mark.parametrize("number", [-1, 0, 1 << 40])
def test_numbers_that_no_process_has_are_not_asked_for(number: int) -> None:
    assert ProcessIdentity(processes.this_machine(), number).state() == "unknown"


def test_processes_of_another_machine_or_container_are_unknown() -> None:
    assert replace(ProcessIdentity.current(), machine="another").state() == "unknown"


def test_without_proc_the_number_must_do(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    own = ProcessIdentity.current()
    assert own.started == 0 and own.state() == "alive"
    assert replace(own, number=process.pid).state() == "gone"
