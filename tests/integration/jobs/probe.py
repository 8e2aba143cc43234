"""Jobs for the probe: a machine that is busy with something else just while steps without communication are timed."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench.probe import Prober
from gradwire.bench.probe_job import ProbeJob

SILENT, OTHERS, BUSY = 0.01, 0.03, 0.1  # seconds of steps: without communication, with it, and while other work runs


class Job(ProbeJob):
    """Steps of known seconds, of which a busy machine hides no order."""

    busy_times = 0
    seen: list[nn.Module] = []  # noqa: RUF012  # the copies that were timed without communication

    def step(self, model: nn.Module) -> None:
        """See `ProbeJob.step`."""
        silent = isinstance(model, DistributedDataParallel) and not model.broadcast_buffers
        if silent and not any(model is each for each in Job.seen):
            Job.seen.append(model)
        time.sleep(OTHERS if not silent else SILENT if len(Job.seen) > Job.busy_times else BUSY)
        super().step(model)


def other_work(rank: int, world_size: int, times: int) -> list[Any]:
    """Probe while other work runs in the first `times` trials without communication."""
    Job.busy_times, Job.seen = times, []
    said: list[str] = []
    model = nn.Sequential(nn.Linear(8, 8))
    job = Job("model", model, (torch.ones(2, 8),), loss=torch.sum)
    prober = Prober(job, "exact", seconds=0.01, say=said.append)
    return [prober.run().as_dict(), said]
