"""What a rank does, by its file, the file's age, and its process."""

from __future__ import annotations

import pytest

from gradwire.observe.jobs import jobs_of, view
from gradwire.observe.processes import ProcessIdentity, ProcessState
from gradwire.observe.status import RankStatus
from gradwire.observe.status_files import StatusFile
from tests.observe.statuses import blocked, status


@pytest.mark.parametrize(
    ("found", "age", "process", "state", "text"),
    [
        (status(), 1.0, "alive", "running", ""),
        (status(), 1.0, "unknown", "running", ""),
        (status(num_steps=0), 1.0, "alive", "starting", "no step yet"),
        (status(), 60.0, "alive", "silent", "last status 60 s ago"),
        (status(), 60.0, "unknown", "silent", "last status 60 s ago"),
        (status(), 1.0, "stopped", "stopped", "stopped by a signal or a debugger"),
        (status(), 1.0, "gone", "killed", "gone without a goodbye"),
        (status(end="detached"), 999.0, "gone", "ended", ""),
        (status(end="exited"), 999.0, "gone", "ended", "the script has ended"),
        (status(error="PeerLostError: rank 1"), 1.0, "gone", "failed", "PeerLostError: rank 1"),
        (blocked(0, 1, 2.0), 1.0, "alive", "running", ""),
        (blocked(0, 1, 8.0), 1.0, "alive", "blocked", "waits 9 s for rank 1 (recv scatter of fc.weight)"),
        (status(step_age=30.0), 1.0, "alive", "idle", "no step has begun for 31 s"),
    ],
)
def test_states(found: RankStatus, age: float, process: ProcessState, state: str, text: str) -> None:
    seen = view(found, age, process)
    assert seen.state == state and seen.text.startswith(text)
    assert bool(seen.text) == bool(text)


def test_live_jobs_come_first_and_then_the_newest() -> None:
    own = ProcessIdentity.current()
    files = [
        StatusFile(status(0, job="a" * 16, started=3.0, end="detached"), 1.0),
        StatusFile(status(1, job="b" * 16, started=1.0, process=own), 1.0),
        StatusFile(status(0, job="b" * 16, started=1.0, process=own), 1.0),
        StatusFile(status(0, job="c" * 16, started=2.0, process=own), 1.0),
    ]
    jobs = jobs_of(files)
    assert [(job.name[0], job.live, [rank.status.rank for rank in job.ranks], job.missing) for job in jobs] == [
        ("c", True, [0], [1]), ("b", True, [0, 1], []), ("a", False, [0], [1]),
    ]  # fmt: skip


def test_of_two_files_of_a_rank_the_younger_counts() -> None:
    (job,) = jobs_of([StatusFile(status(step=2), 1.0), StatusFile(status(step=1), 9.0)])
    assert [rank.status.step for rank in job.ranks] == [2]
