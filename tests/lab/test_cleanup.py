"""However a lab ends, it leaves no process, no namespace and no interface."""

import os
import signal
import subprocess
import sys

import pytest

from gradwire.lab import Lab
from tests.lab.support import Watch, children

# Leaves its process group, so that only the keeper can find it.
DAEMON = "setsid sleep 60 > /dev/null 2>&1 & echo $!; wait"
API = f"""
import time
from gradwire.lab import Lab
lab = Lab(2, "10mbit")
lab.run(["sh", "-c", {DAEMON!r}], on_line=lambda host, stream, line: print(line, flush=True))
"""
CLI = [sys.executable, "-m", "gradwire.cli", "lab", "--hosts", "2", "--rate", "10mbit", "--", "sh", "-c", DAEMON]


def start(command: list[str]) -> tuple[subprocess.Popen[str], Watch]:
    """A lab in a process of its own, and a watch on everything that it has started."""
    # Where the tests run in the background, shells have them ignore interrupts, and so would the lab.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    daemons = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    # The keeper and two shells are children of the lab; the daemons are not.
    mine = children(process.pid)
    assert len(mine) == 3
    return process, Watch(mine + daemons)


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_command_is_ended_by_a_signal(number):
    process, watch = start(CLI)
    with process:
        process.send_signal(number)
        code = process.wait(timeout=30)
        watch.assert_all_ended()
    assert code == {signal.SIGKILL: -signal.SIGKILL}.get(number, 128 + number)


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_that_holds_a_lab_is_ended_by_a_signal(number):
    process, watch = start([sys.executable, "-c", API])
    with process:
        process.send_signal(number)
        assert process.wait(timeout=30) == -number
        watch.assert_all_ended()


@pytest.mark.root
def test_an_exception_inside_the_lab():
    def fail(lab: Lab) -> None:
        started = [lab.popen(["sleep", "60"], host).pid for host in range(2)]
        watches.append(Watch([*started, lab._namespaces.keeper_pid]))
        raise ZeroDivisionError

    watches: list[Watch] = []
    with pytest.raises(ZeroDivisionError), Lab(2) as lab:
        fail(lab)
    watches[0].assert_all_ended()


@pytest.mark.root
def test_a_lab_that_cannot_be_finished_leaves_nothing(monkeypatch):
    before = set(children(os.getpid()))
    monkeypatch.setattr("gradwire.lab.network.INTERFACE", "a-name-too-long-for-linux")
    with pytest.raises(RuntimeError, match="`ip` could not do"):
        Lab(2)
    assert set(children(os.getpid())) <= before
