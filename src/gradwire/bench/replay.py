"""Replay a recorded backward pass: computation is replaced by waiting; gradients, DDP, codecs and network are real.

Two cores cannot compute for four ranks without distorting times. During a replay the processor is as free as if each
rank had a machine of its own. It is also freer for codecs than in a real backward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench import methods
from gradwire.bench.job import Segment, SegmentOutcome, TimedSteps
from gradwire.bench.rank import Rank
from gradwire.bench.recording import RecordedBucket, Recording
from gradwire.bench.segment import is_identical
from gradwire.bench.timing import Steps, time_steps
from gradwire.planner import PlanTable

_WARM_UP_STEPS = 30


class RecordedModel(nn.Module):
    """Parameters whose backward pass yields the recorded gradients at the recorded times.

    Args:
        recording: Recorded step.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording
        self.started = 0.0
        self.steps = 0
        # DDP builds its first buckets in the reverse order of the parameters.
        shapes = [pair for bucket in recording.buckets for pair in zip(bucket.names, bucket.shapes, strict=True)]
        for name, shape in reversed(shapes):
            self.register_parameter(methods.flat_name(name), nn.Parameter(torch.zeros(shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Start the clock. Takes and returns a scalar."""
        self.started = time.perf_counter()
        self.steps += 1
        x = _until(x, self, self.recording.backward_seconds, None)
        for bucket in reversed(self.recording.buckets):
            parameters = (self.get_parameter(methods.flat_name(name)) for name in bucket.names)
            x = _until(x, self, bucket.ready_seconds, bucket, *parameters)
        return x


class _Until(torch.autograd.Function):
    """The identity. Backward waits for a moment of the step, then returns the gradients of a bucket."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, model: RecordedModel, moment: float, bucket: RecordedBucket | None, *_: torch.Tensor
    ) -> torch.Tensor:
        ctx.place = model, moment, bucket
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        model, moment, bucket = ctx.place
        gradients = [] if bucket is None else bucket.views(bucket.gradients[model.steps % len(bucket.gradients)])
        sleep_until(model.started + moment)
        return grads[0], None, None, None, *gradients


_until: Callable[..., torch.Tensor] = _Until.apply


@dataclass
class Replay(Steps):
    """Steps that wait while the recorded rank computed. Their loss is NaN."""

    @classmethod
    def begin(cls, rank: Rank, segment: Segment, recording: Recording) -> Replay:
        """A new module with the method attached."""
        ddp = DistributedDataParallel(
            RecordedModel(recording), bucket_cap_mb=segment.bucket_mb, gradient_as_bucket_view=True
        )
        optimizer = without_learning(rank.workload.optimizer(ddp))
        return cls(rank, segment, ddp, optimizer, methods.connect(segment.method, ddp, optimizer, rank.job.seed))

    def warm_up(self) -> None:
        """Compile kernels, and fill residuals: what is sent at first is not what is sent later."""
        for _ in range(_WARM_UP_STEPS):
            self.step()

    def step(self) -> tuple[float, float]:
        start = time.perf_counter()
        recording = self.ddp.module.recording
        loss = self.ddp(torch.zeros((), requires_grad=True))
        self.optimizer.zero_grad()
        loss.backward()
        end = time.perf_counter()
        self.optimizer.step()
        sleep_until(end + recording.step_seconds - recording.backward_seconds)
        self.steps += 1
        return float("nan"), time.perf_counter() - start


def run_replay(rank: Rank, index: int, recordings: Mapping[float, Recording]) -> SegmentOutcome:
    """Run one segment: a method at each rate."""
    segment = rank.job.segments[index]
    rank.set_rate(None)
    replay = Replay.begin(rank, segment, recordings[segment.bucket_mb])
    replay.warm_up()
    timed = [with_full_names(time_steps(replay, index, rate)) for rate in segment.rates]
    rank.set_rate(None)
    gradients = [parameter.grad for parameter in replay.ddp.parameters() if parameter.grad is not None]
    identical = None if segment.method == methods.SILENT else is_identical(gradients)
    replay.connection.close()
    return SegmentOutcome(index, rank.rank, identical=identical, timed=timed)


def with_full_names(timed: TimedSteps) -> TimedSteps:
    """The plan of ``auto`` with the names of the recorded model, for trainings of that model."""
    if timed.settled is None or methods.is_native(timed.settled):
        return timed
    table = PlanTable.from_json(timed.settled)
    rows = tuple(replace(row, name=methods.full_name(row.name)) for row in table.rows)
    return replace(timed, settled=replace(table, rows=rows).to_json())


def without_learning(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with learning rate 0. What `auto` may choose depends on its momentum, which stays."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def sleep_until(moment: float) -> None:
    """Sleep until a moment of `time.perf_counter`."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
