"""Jobs in a folder of status files: which ranks belong together, and what each of them does.

A rank's file says what it did when it was written. Together with the file's age and the process, that tells ranks
apart that train, wait, are frozen, were killed, or have ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gradwire.observe.processes import ProcessState
from gradwire.observe.status import RankStatus
from gradwire.observe.status_files import StatusFile

RankState = Literal["running", "starting", "blocked", "idle", "silent", "stopped", "killed", "failed", "ended"]
LIVE: frozenset[RankState] = frozenset({"running", "starting", "blocked", "idle", "silent", "stopped"})
"""States of ranks that may go on."""
BLOCKED_SECONDS = 5.0
IDLE_SECONDS = 10.0
IDLE_STEPS = 5.0
"""A rank is idle if no step has begun for so long: the larger of seconds and usual steps."""
SILENT_SECONDS = 5.0
SILENT_INTERVALS = 4.0
"""A rank is silent if its file is older than these together."""


@dataclass(frozen=True)
class RankView:
    """A rank, as seen now.

    Attributes:
        status: Its latest status.
        age: Seconds since it was written.
        state: What it does.
        text: The same in words, where there is more to say.
    """

    status: RankStatus
    age: float
    state: RankState
    text: str = ""


@dataclass(frozen=True)
class JobView:
    """A job: the ranks of one `attach`.

    Attributes:
        name: Its name.
        ranks: The ranks whose files are in the folder, in order.
    """

    name: str
    ranks: tuple[RankView, ...]

    @property
    def first(self) -> RankStatus:
        """The status of the first of these ranks."""
        return self.ranks[0].status

    @property
    def live(self) -> bool:
        """Whether any rank may go on."""
        return any(rank.state in LIVE for rank in self.ranks)

    @property
    def started(self) -> float:
        """When it was attached, in seconds since 1970."""
        return max(rank.status.started for rank in self.ranks)

    @property
    def missing(self) -> list[int]:
        """Ranks whose files are not in the folder. They are on other machines, or write elsewhere."""
        here = {rank.status.rank for rank in self.ranks}
        return [rank for rank in range(min(self.first.world_size, 1 << 16)) if rank not in here]


def jobs_of(files: Iterable[StatusFile]) -> list[JobView]:
    """Return the jobs of a folder: the live ones first, and of these the newest."""
    by_job: dict[tuple[str, int], dict[int, RankView]] = defaultdict(dict)
    for file in sorted(files, key=lambda each: -each.age):
        status = file.status
        by_job[status.job, status.world_size][status.rank] = view(status, file.age, status.process.state())
    jobs = [JobView(job, tuple(ranks[rank] for rank in sorted(ranks))) for (job, _), ranks in by_job.items()]
    return sorted(jobs, key=lambda job: (job.live, job.started), reverse=True)


def view(status: RankStatus, age: float, process: ProcessState) -> RankView:
    """Return what a rank does.

    Args:
        status: Its latest status.
        age: Seconds since it was written.
        process: Whether its process lives.
    """
    state, text = _state(status, age, process)
    return RankView(status, age, state, text)


def _state(status: RankStatus, age: float, process: ProcessState) -> tuple[RankState, str]:
    if status.error:
        return "failed", status.error
    if status.end:
        return "ended", "" if status.end == "detached" else "the script has ended"
    if process == "gone":
        return "killed", "gone without a goodbye; the log of the rank, or of the system, says why"
    if process == "stopped":
        return "stopped", f"stopped by a signal or a debugger; last status {_ago(age)}"
    if age > SILENT_SECONDS + SILENT_INTERVALS * status.interval:
        return "silent", f"last status {_ago(age)}; frozen, swapping, or without its disk"
    waiting = status.waiting
    if waiting is not None and waiting.seconds + age > BLOCKED_SECONDS:
        whom = "" if waiting.peer is None else f" for rank {waiting.peer}"
        return "blocked", f"waits {waiting.seconds + age:.0f} s{whom} ({waiting.phase} of {waiting.tensor})"
    if status.num_steps == 0 or status.step_age is None:
        return "starting", "no step yet"
    pause = status.step_age + age
    if pause > max(IDLE_SECONDS, IDLE_STEPS * status.latest.seconds):
        return "idle", f"no step has begun for {pause:.0f} s"
    return "running", ""


def _ago(age: float) -> str:
    return f"{age:.0f} s ago"
