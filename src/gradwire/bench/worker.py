"""One rank of a training benchmark: `python -m gradwire.bench.worker JOB.json`, started by `launch`.

Guarantees: it ends with its parent, and after the job's deadline in any case.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.bench.job import Job, Message, Outcome, Progress, RateRequest, to_line
from gradwire.bench.workload import Workload, make_workload

_PROGRESS_SECONDS = 0.2
_POLL_SECONDS = 0.005


class Rank:
    """One process's part in a job: what its segments share."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.workload: Workload = make_workload(job.workload)
        self._ticket = 0
        self._rate: str | None = None
        self._next_progress = 0.0

    def say(self, message: Message) -> None:
        """One line to the parent."""
        # One write a line, so that lines of several threads cannot mix.
        sys.stdout.write(to_line(message) + "\n")
        sys.stdout.flush()

    def progress(self, progress: Progress) -> None:
        """Tell the parent how far it is, from rank 0 and not too often."""
        now = time.monotonic()
        if self.rank == 0 and (now >= self._next_progress or progress.step == progress.steps):
            self._next_progress = now + _PROGRESS_SECONDS
            self.say(progress)

    def set_rate(self, rate: str | None) -> None:
        """Have the parent set the rate of all links; returns on all ranks once it has."""
        if not self.job.shaped or rate == self._rate:
            return
        dist.barrier()  # nobody still sends at the old rate
        self._ticket, self._rate = self._ticket + 1, rate
        if self.rank == 0:
            self.say(RateRequest(self._ticket, rate))
        answer = Path(self.job.folder) / f"rate-{self._ticket}"
        while not answer.exists():
            time.sleep(_POLL_SECONDS)  # the job's deadline ends this

    def agree(self, number: int) -> int:
        """Rank 0's number, on all ranks."""
        box = torch.tensor([number])
        dist.broadcast(box, 0)
        return int(box)


RunSegment = Callable[[int], Outcome]
"""Runs the segment of an index."""


def main(runner: Callable[[Rank], RunSegment] | None = None) -> None:
    """Runs all segments of the job.

    Args:
        runner: gives what runs a segment; None for training or replay, as the job says.
    """
    job = Job.load(Path(sys.argv[1]))
    _limit_life(job.deadline_seconds)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=job.init_method,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=min(120.0, job.deadline_seconds)),
    )
    rank = Rank(job)
    run = (runner or _runner)(rank)
    for index in range(len(job.segments)):
        rank.say(run(index))
        dist.barrier()
    dist.destroy_process_group()


def _runner(rank: Rank) -> RunSegment:
    if rank.job.replay:
        from gradwire.bench.recording import record
        from gradwire.bench.replay import run_replay

        recordings = {size: record(rank, size) for size in sorted({s.bucket_mb for s in rank.job.segments})}
        return lambda index: run_replay(rank, index, recordings)
    from gradwire.bench.segment import run_segment

    return lambda index: run_segment(rank, index)


def _limit_life(deadline_seconds: float) -> None:
    """A deadline that nothing in this process can hold up, and on Linux the end of the parent too."""
    signal.setitimer(signal.ITIMER_REAL, deadline_seconds)
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            sys.exit(1)


if __name__ == "__main__":
    main()
