"""`gradwire top` beside a real job: ranks that train, are stopped, go on, are killed, fail and end."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gradwire.observe.jobs import JobView, jobs_of
from gradwire.observe.status_files import read_folder
from tests.integration.launch import ROOT, free_port

pytestmark = pytest.mark.timeout(400)
PATIENCE = 180.0  # seconds; on a busy machine, two interpreters that import torch may need most of it


@contextlib.contextmanager
def two_ranks(folder: Path, method: str, end: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks of `tests.integration.jobs.top`. They are killed at the end."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    env |= {"GRADWIRE_DUMP_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integration.jobs.top", method, end]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        started = []
        for rank in range(2):
            process = subprocess.Popen(command, cwd=ROOT, env=env | {"RANK": str(rank)}, **pipes)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield started


def until_states(folder: Path, *states: str, step: int = 0) -> JobView:
    """Look at the folder until all ranks are in these states, at a step beyond `step`; fails if that does not come."""
    deadline = time.monotonic() + PATIENCE
    while True:
        jobs = jobs_of(read_folder(folder).files) if folder.exists() else []
        if jobs and [rank.state for rank in jobs[0].ranks] == list(states) and jobs[0].first.step > step:
            return jobs[0]
        assert time.monotonic() < deadline, [(rank.state, rank.text) for job in jobs for rank in job.ranks]
        time.sleep(0.05)


def frame(folder: Path) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "gradwire.cli", "top", "--once", "--folder", str(folder)]
    env = os.environ | {"COLUMNS": "118"}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE, env=env).stdout


def heed_ctrl_c() -> None:
    """Jobs that a shell starts in the background, and what they start, ignore it otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def live_frame(folder: Path) -> bytes:
    """What the command draws on a terminal, until Ctrl-C after the first bytes of a frame."""
    terminal, other_end = pty.openpty()
    command = [sys.executable, "-m", "gradwire.cli", "top", "--folder", str(folder), "--interval", "0.1"]
    ends = {"stdin": other_end, "stdout": other_end, "stderr": other_end, "start_new_session": True}
    process = subprocess.Popen(command, **ends, preexec_fn=heed_ctrl_c)
    os.close(other_end)
    drawn = b""
    with open(terminal, "rb", buffering=0) as reader:
        while drawn.count(b"gradwire top") < 3:
            assert select.select([reader], [], [], PATIENCE)[0], drawn
            drawn += reader.read(1 << 16)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while more := reader.read(1 << 16):
                drawn += more
    assert process.wait(PATIENCE) == 0, drawn
    return drawn


@pytest.mark.ci
def test_ranks_that_train_stop_die_and_fail_are_told_apart(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    with two_ranks(folder, "threelc", "never") as (first, second):
        job = until_states(folder, "running", "running", step=20)
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.glob("*.json"))
        assert [rank.status.process.number for rank in job.ranks] == [first.pid, second.pid]
        text = frame(folder)
        assert "threelc" in text and "2 of 2" in text and text.count("● running") == 2
        drawn = live_frame(folder)
        assert b"\x1b[?1049h" in drawn and drawn.endswith(b"\x1b[?1049l"), "the screen is as it was"
        assert b"running" in drawn
        second.send_signal(signal.SIGSTOP)
        until_states(folder, "blocked", "stopped")
        text = frame(folder)
        assert "for rank 1 (" in text and "stopped by a signal or a debugger" in text
        second.send_signal(signal.SIGCONT)
        job = until_states(folder, "running", "running", step=job.first.step + 1)
        status = job.first
        assert status.latest.steps > 0 and status.sent_bytes > 0 and status.dense_bytes > 4 * status.sent_bytes
        assert 0 < status.latest.wait < status.latest.seconds
        assert status.residual_norm is not None and status.residual_norm > 0
        assert [link.peer for link in status.links] == [1] and status.links[0].received_bytes > 0
        assert "0.weight" in {tensor.name for tensor in status.tensors}
        assert all(tensor.elements for tensor in status.tensors), "control messages are no tensors"
        second.kill()
        job = until_states(folder, "failed", "killed")
        assert "rank 1" in job.ranks[0].text
        out, _ = first.communicate(timeout=PATIENCE)
        assert json.loads(out)["error"] == "PeerLostError"
        until_states(folder, "failed", "killed")
        assert "gone without a goodbye" in frame(folder)


@pytest.mark.ci
def test_what_auto_decided_is_shown_and_how_a_job_ended(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    with two_ranks(folder, "auto", "input") as ranks:
        deadline = time.monotonic() + PATIENCE
        while True:
            job = until_states(folder, "running", "running")
            auto = job.first.auto
            if auto is not None and auto.settled and auto.decisions:  # otherwise, it may be trying another candidate
                break
            assert time.monotonic() < deadline, "auto has not decided"
        decision = auto.decisions[-1]
        assert auto.current == decision.chosen in {each.name for each in decision.candidates}
        assert decision.link_bits > 0
        text = frame(folder)
        assert "auto now: " in text and "← chosen" in text and "at the start" in text
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        until_states(folder, "ended", "ended")
        assert frame(folder).count("✓ ended") == 2
        assert [rank.wait(PATIENCE) for rank in ranks] == [0, 0]
