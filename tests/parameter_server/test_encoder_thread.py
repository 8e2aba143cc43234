"""The encoder thread: tasks in order, and one typed error for whoever waits."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from gradwire.core.errors import PeerLostError, SyncError
from gradwire.parameter_server import encoder_thread
from gradwire.parameter_server.encoder_thread import EncoderThread

WAIT = 20.0


def test_tasks_run_in_order_before_it_is_drained_or_closed() -> None:
    encoder, ran = EncoderThread(), []
    for number in range(100):
        encoder.submit(lambda number=number: ran.append(number))
    encoder.drain()
    assert ran == list(range(100))
    encoder.submit(lambda: ran.append(100))
    encoder.close()
    encoder.close()
    assert ran == list(range(101))


@pytest.mark.parametrize("cause", [ValueError("a bug"), SystemExit(3), PeerLostError("gone", rank=2)])
def test_whatever_a_task_raises_is_one_typed_error_and_no_task_runs_after_it(cause: BaseException) -> None:
    def task() -> None:
        raise cause

    encoder, ran = EncoderThread(), []
    encoder.submit(task)
    encoder.submit(lambda: ran.append("next"))
    errors = []
    for call in (encoder.drain, encoder.check, encoder.drain):
        with pytest.raises(SyncError) as caught:
            call()
        errors.append(caught.value)
    assert errors[1:] == errors[:-1]
    assert cause in (errors[0], errors[0].__cause__)
    encoder.close()
    assert ran == []


def test_whoever_waits_for_its_work_is_told_of_an_error() -> None:
    told: list[SyncError] = []
    encoder = EncoderThread(told.append)
    encoder.submit(lambda: 1 / 0)
    with pytest.raises(SyncError) as caught:
        encoder.drain()
    encoder.close()
    assert told == [caught.value]


def test_who_waits_for_a_task_that_does_not_end_looks_for_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_thread, "_LOOK_SECONDS", 0.05)
    go_on = threading.Event()

    def check() -> Any:
        raise PeerLostError("the server has ended")

    encoder = EncoderThread()
    encoder.submit(lambda: go_on.wait(WAIT))
    with pytest.raises(PeerLostError, match="the server has ended"):
        encoder.drain(check)
    go_on.set()
    encoder.close()


def test_submitted_tasks_run_before_the_interpreter_ends() -> None:
    script = (
        "import time\n"
        "from gradwire.parameter_server.encoder_thread import EncoderThread\n"
        "encoder = EncoderThread()\n"
        "encoder.submit(lambda: time.sleep(1))\n"
        "encoder.submit(lambda: print('sent', flush=True))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "sent\n", "")
