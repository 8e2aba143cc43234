"""One rank of a training benchmark: `python -m gradwire.bench.worker JOB.json`, started by `launch`.

The process ends when its parent ends, and at the job's deadline at the latest.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.bench.job import BenchmarkJob
from gradwire.bench.rank import Rank, RunSegment


def main(runner: Callable[[Rank], RunSegment] | None = None) -> None:
    """Run all segments of the job.

    Args:
        runner: Returns the function that runs a segment. Default: training or replay, depending on the job.
    """
    job = BenchmarkJob.load(Path(sys.argv[1]))
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
    # Not by the interpreter's end: threads of Gloo may still hold tensors then, and letting go of them aborts the
    # process ("terminate called without an active exception", https://github.com/pytorch/pytorch/pull/179291).
    sys.stdout.flush()
    os._exit(0)


def _runner(rank: Rank) -> RunSegment:
    if rank.job.replay:
        from gradwire.bench.recording import record_all
        from gradwire.bench.replay import run_replay

        recordings = record_all(rank)
        return lambda index: run_replay(rank, index, recordings)
    from gradwire.bench.segment import run_segment

    return lambda index: run_segment(rank, index)


def _limit_life(deadline_seconds: float) -> None:
    """End the process at the deadline, whatever it does, and on Linux also when the parent ends."""
    signal.setitimer(signal.ITIMER_REAL, deadline_seconds)
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call
            sys.exit(1)


if __name__ == "__main__":
    main()
