"""Timed steps of `gradwire probe`: forward and backward of a copy of the model, by a hook of DDP's or by gradwire.

Each measurement has a copy of the model of its own, so that nothing of the user's changes. Of each rank the median
counts, of all ranks the largest. All ranks make the same calls in the same order.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench.probe_job import ProbeJob
from gradwire.bench.users import users_code
from gradwire.core import torch_private
from gradwire.ddp.attach import attach
from gradwire.sync.plan import Plan
from gradwire.tuning.calibration import Calibration
from gradwire.tuning.step_clock import BucketTiming as Handed
from gradwire.tuning.step_clock import StepClock, StepTiming

MAX_STEPS = 50
_WARM_UP = 2  # DDP makes its buckets anew after the first step; the second one says how many there is time for
_WARM_UP_RESIDUALS = 6  # by then what is held back, and with it how many bytes are sent, has grown to its size

Future = torch.futures.Future[torch.Tensor]
Hook = Callable[[dist.ProcessGroup, torch_private.GradBucket], Future]
HOOKS: dict[str, Hook] = {
    "fp32": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}
"""DDP's own."""


@dataclass(frozen=True)
class TimedBucket:
    """Names of parameters, seconds from the first bucket's gradients to these, and their bytes."""

    names: tuple[str, ...]
    ready: float
    nbytes: int


@dataclass(frozen=True)
class TimedBackward:
    """The same on all ranks.

    Attributes:
        step: seconds.
        steps: how many were timed.
        sent_bytes: of a step, by gradwire.
        codec: seconds of a step in which gradwire encodes and decodes.
        busy: seconds of a step in which DDP's all-reduce has work.
        buckets: of DDP, where it was timed with a hook.
    """

    step: float
    steps: int
    sent_bytes: float = 0.0
    codec: float = 0.0
    busy: float = 0.0
    buckets: tuple[TimedBucket, ...] = ()


class Stopwatch:
    """Times steps of one job.

    Args:
        job: on the device where it runs.
        survey: for numbers of all ranks.
        seconds: of a measurement, about; of slow steps there is one at least.
    """

    def __init__(self, job: ProbeJob, survey: Calibration, seconds: float) -> None:
        self._job = job
        self._survey = survey
        self._seconds = seconds
        self._cuda = any(parameter.is_cuda for parameter in job.model.parameters())
        self._has_unused = self._try()

    def without_communication(self) -> TimedBackward:
        """A hook that sends nothing."""
        return self._with_hook(lambda group, bucket: _done(bucket.buffer()), silent=True)

    def with_hook(self, name: str) -> TimedBackward:
        """One of `HOOKS`."""
        return self._with_hook(HOOKS[name])

    def with_plan(self, plan: Plan) -> TimedBackward:
        """By gradwire."""
        ddp = self._wrap()
        handle = attach(ddp, plan, check_every=0)
        try:
            self._warm(ddp, _WARM_UP_RESIDUALS)
            before = handle.report().total
            times = self._times(ddp, lambda: None)
            after = handle.report().total
        finally:
            handle.detach()
        spent = after.encode_seconds + after.decode_seconds - before.encode_seconds - before.decode_seconds
        sent_bytes = after.sent_bytes - before.sent_bytes
        step, sent, codec = self._largest([median(times), sent_bytes / len(times), spent / len(times)])
        return TimedBackward(step, len(times), sent, codec)

    def _with_hook(self, hook: Hook, silent: bool = False) -> TimedBackward:
        ddp, clock = self._wrap(silent), StepClock()
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}

        def timed_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations as objects
            if bucket.index() == 0:
                clock.begin()
            noted = clock.ready(
                [names[id(parameter)] for parameter in torch_private.bucket_parameters(bucket)], bucket.buffer().nbytes
            )
            return hook(ddp.process_group, bucket).then(lambda future: _note(clock, noted, future))

        ddp.register_comm_hook(None, timed_hook)
        self._warm(ddp)
        steps: list[StepTiming] = []

        def end_step() -> None:
            clock.begin()
            assert clock.last is not None, "a step has passed"
            steps.append(clock.last)

        times = self._times(ddp, end_step)
        alike = [step for step in steps if len(step.buckets) == len(steps[-1].buckets)]
        readies = np.median([[bucket.ready for bucket in step.buckets] for step in alike], axis=0)
        seconds, busy, *ready = self._largest([median(times), median(step.busy for step in alike), *readies])
        buckets = tuple(TimedBucket(bucket.names, at, bucket.nbytes) for bucket, at in zip(steps[-1].buckets, ready))
        return TimedBackward(seconds, len(times), busy=busy, buckets=buckets)

    # -- steps -----------------------------------------------------------------------------------------------

    def _try(self) -> bool:
        """A step of a copy by itself; whether it leaves parameters without a gradient, on any rank."""
        model = self._job.copy()
        with users_code(f"A step of {self._job.name}"):
            self._job.step(model)
        unused = any(p.requires_grad and p.grad is None for p in model.parameters())
        return bool(self._largest([float(unused)])[0])

    def _wrap(self, silent: bool = False) -> DistributedDataParallel:
        gc.collect()  # what was measured before
        # Replicas need not agree: parameters do not change, and on a slow link to bring them takes longer than steps.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch has another name for broadcast_buffers
            return DistributedDataParallel(
                self._job.copy(),
                init_sync=False,
                find_unused_parameters=self._has_unused,
                broadcast_buffers=not silent,
            )

    def _warm(self, ddp: nn.Module, steps: int = _WARM_UP) -> None:
        for _ in range(steps):
            self._last = self._timed(ddp)

    def _times(self, ddp: nn.Module, after: Callable[[], None]) -> list[float]:
        """Steps as the last one of the warm-up says, as many on each rank."""
        slowest = self._largest([self._last])[0]
        times = []
        for _ in range(min(MAX_STEPS, math.ceil(self._seconds / slowest))):
            times.append(self._timed(ddp))
            after()
        return times

    def _timed(self, ddp: nn.Module) -> float:
        begun = time.perf_counter()
        self._job.step(ddp)
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def _largest(self, mine: Iterable[float]) -> list[float]:
        found: list[float] = self._survey.largest(np.array(list(mine), dtype=float)).tolist()
        return found


def _note(clock: StepClock, noted: Handed, future: Future) -> torch.Tensor:
    clock.done(noted)
    return future.value()


def _done(tensor: torch.Tensor) -> Future:
    future: Future = torch.futures.Future()
    future.set_result(tensor)
    return future
