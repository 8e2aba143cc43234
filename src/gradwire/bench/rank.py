"""One rank of a benchmark: communication with the parent process, and agreement with the other ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.bench.job import BenchmarkJob, Message, Progress, RateRequest, SegmentOutcome, to_line
from gradwire.bench.workload import Workload
from gradwire.bench.workloads import make_workload

_PROGRESS_SECONDS = 0.2
_POLL_SECONDS = 0.005


class Rank:
    """One rank of a job, shared by its segments."""

    def __init__(self, job: BenchmarkJob) -> None:
        self.job = job
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.workload: Workload = make_workload(job.workload)
        self._ticket = 0
        self._rate: str | None = None
        self._next_progress = 0.0

    def say(self, message: Message) -> None:
        """Send a message to the parent."""
        # A single write, so that lines of several threads cannot mix.
        sys.stdout.write(to_line(message) + "\n")
        sys.stdout.flush()

    def progress(self, progress: Progress) -> None:
        """Report progress to the parent, from rank 0 only and not too often."""
        now = time.monotonic()
        if self.rank == 0 and (now >= self._next_progress or progress.step == progress.steps):
            self._next_progress = now + _PROGRESS_SECONDS
            self.say(progress)

    def set_rate(self, rate: str | None) -> None:
        """Let the parent set the rate of all links, and wait until it has. All ranks call it."""
        if not self.job.shaped or rate == self._rate:
            return
        dist.barrier()  # no rank still sends at the old rate
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


RunSegment = Callable[[int], SegmentOutcome]
"""Runs the segment with this index."""
