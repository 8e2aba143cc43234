"""Record a backward pass: when each gradient is ready on a rank that has the processor to itself.

The ranks take turns, so that they do not disturb each other. Each keeps the gradients of its own data. All use the
times of rank 0, and all bucket sizes the duration of one step: computing takes as long, however DDP groups gradients,
and two records of the same step differ by more than many a method gains.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench.methods import completed
from gradwire.bench.rank import Rank
from gradwire.bench.workload import Samples

_TRAINED_STEPS = 10
_TIMED_STEPS = 7
_KEPT_STEPS = 3
"""Number of steps whose gradients are kept and replayed in turn. Each takes as much memory as the parameters."""


@dataclass(frozen=True)
class RecordedBucket:
    """One bucket as DDP passes it to a hook.

    Attributes:
        names: Names of its parameters.
        shapes: Shapes of its parameters.
        ready_seconds: Time from the start of the step until the bucket is ready.
        gradients: One flat tensor for each step kept.
    """

    names: list[str]
    shapes: list[torch.Size]
    ready_seconds: float
    gradients: list[torch.Tensor]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The gradients as views of a bucket's buffer."""
        sizes = [shape.numel() for shape in self.shapes]
        ends = itertools.accumulate(sizes)
        return [buffer[end - size : end].view(shape) for end, size, shape in zip(ends, sizes, self.shapes, strict=True)]


@dataclass(frozen=True)
class Recording:
    """A step of a rank that runs alone.

    Attributes:
        buckets: Buckets in the order in which they become ready.
        backward_seconds: Time from the start of the step to the end of the backward pass.
        step_seconds: Time from the start of the step to the end of the optimizer step.
    """

    buckets: list[RecordedBucket]
    backward_seconds: float
    step_seconds: float

    def lasting(self, other: Recording) -> Recording:
        """The same with the duration of another recording, and buckets ready at the same shares of backward."""
        share = other.backward_seconds / self.backward_seconds
        buckets = [replace(bucket, ready_seconds=share * bucket.ready_seconds) for bucket in self.buckets]
        return Recording(buckets, other.backward_seconds, other.step_seconds)


@dataclass
class _Tape:
    """Data of one step."""

    started: float
    ready: list[float]
    gradients: list[torch.Tensor]
    parameters: list[list[torch.Tensor]]
    backward_end: float = 0.0
    step_end: float = 0.0

    @classmethod
    def begin(cls) -> _Tape:
        return cls(time.perf_counter(), [], [], [])

    def hook(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self.ready.append(time.perf_counter() - self.started)
        self.gradients.append(bucket.buffer().clone())
        self.parameters.append(list(bucket.parameters()))
        return completed(bucket.buffer())


def record_all(rank: Rank) -> dict[float, Recording]:
    """Record a step for each bucket size of the job, all with the duration of the first. All ranks call it."""
    found = {size: record(rank, size) for size in sorted({segment.bucket_mb for segment in rank.job.segments})}
    first = next(iter(found.values()))
    return {size: each.lasting(first) for size, each in found.items()}


def record(rank: Rank, bucket_mb: float) -> Recording:
    """Record a step on every rank, one rank at a time. All ranks call it."""
    limit = timedelta(seconds=rank.job.deadline_seconds)
    groups = [dist.new_group([member], timeout=limit) for member in range(rank.world_size)]
    recording = None
    for member in range(rank.world_size):
        if member == rank.rank:
            recording = _record_alone(rank, bucket_mb, groups[member])
        dist.barrier()
    assert recording is not None, "every rank takes a turn"
    return _with_times_of_rank_0(recording)


def _record_alone(rank: Rank, bucket_mb: float, group: dist.ProcessGroup | None) -> Recording:
    torch.manual_seed(rank.job.seed)
    model = rank.workload.model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    tapes = [_Tape.begin()]
    ddp.register_comm_hook(None, lambda state, bucket: tapes[-1].hook(bucket))
    optimizer = rank.workload.optimizer(model)
    for step in range(_TRAINED_STEPS + _TIMED_STEPS):
        batch = rank.workload.batch(rank.job.seed, step, rank.rank, rank.world_size)
        tapes = [*tapes[1 - _TIMED_STEPS :], _Tape.begin()]
        _step(ddp, optimizer, batch, tapes)
    kept = tapes[-_KEPT_STEPS:]
    buckets = [
        RecordedBucket(
            names=[names[id(parameter)] for parameter in parameters],
            shapes=[parameter.shape for parameter in parameters],
            ready_seconds=statistics.median(tape.ready[number] for tape in tapes),
            gradients=[tape.gradients[number] for tape in kept],
        )
        for number, parameters in enumerate(tapes[-1].parameters)
    ]
    return Recording(
        buckets,
        statistics.median(tape.backward_end for tape in tapes),
        statistics.median(tape.step_end for tape in tapes),
    )


def _step(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: Samples, tapes: list[_Tape]) -> None:
    tape = tapes[-1]
    loss = nn.functional.cross_entropy(ddp(batch.inputs), batch.targets)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    tape.backward_end = time.perf_counter() - tape.started
    optimizer.step()
    tape.step_end = time.perf_counter() - tape.started


def _with_times_of_rank_0(recording: Recording) -> Recording:
    times = torch.tensor(
        [*(bucket.ready_seconds for bucket in recording.buckets), recording.backward_seconds, recording.step_seconds],
        dtype=torch.float64,
    )
    dist.broadcast(times, 0)
    *ready, backward_seconds, step_seconds = times.tolist()
    buckets = [replace(bucket, ready_seconds=seconds) for bucket, seconds in zip(recording.buckets, ready, strict=True)]
    return Recording(buckets, backward_seconds, step_seconds)
