"""Steps of `gradwire probe`: forward and backward of a copy of the model, averaged by a candidate.

Each trial has a fresh copy of the model, so that nothing of the user's changes. All ranks make the same calls in the
same order.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench.methods import completed
from gradwire.bench.probe_job import ProbeJob
from gradwire.bench.users import users_code
from gradwire.core import torch_private
from gradwire.core.events import Event
from gradwire.ddp.attach import attach
from gradwire.ddp.handle import Handle
from gradwire.sync.options import SyncOptions
from gradwire.tuning.candidates import HOOKS, Candidate, Future
from gradwire.tuning.step_clock import BucketTiming, StepClock, StepTiming
from gradwire.tuning.trials import Script

SILENT = Candidate("no communication", hook="")
_RESIDUAL_STEPS = 4  # by then residuals, and with them the bytes that are sent, have grown to their size


class ReplayedSteps:
    """Runs steps of one job: a `gradwire.tuning.trials.StepRunner`.

    Args:
        job: Model and batch, on the device where they run.
        largest: Returns the largest of all ranks' numbers, position by position.
        timeout: Longest silence of a rank.
    """

    def __init__(
        self, job: ProbeJob, largest: Callable[[np.ndarray], np.ndarray], timeout: timedelta = SyncOptions.timeout
    ) -> None:
        self.last = StepTiming()
        self._job = job
        self._options = SyncOptions(timeout)
        self._on_gpu = any(parameter.is_cuda for parameter in job.model.parameters())
        self._model: nn.Module | None = None
        self._handle: Handle | None = None
        self._clock = StepClock()
        self._sent_bytes = self._codec = 0.0  # so far
        self._has_unused = bool(largest(np.array([float(self._leaves_unused())]))[0])

    def _leaves_unused(self) -> bool:
        """Whether a step leaves parameters without a gradient."""
        model = self._job.copy()
        with users_code(f"A step of {self._job.name}"):
            self._job.step(model)
        return any(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())

    def switch(self, candidate: Candidate) -> Script[None]:
        """See `StepRunner`."""
        self.close()
        gc.collect()
        # Replicas need not agree: parameters do not change, and broadcasting them over a slow link takes long.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch has another name for broadcast_buffers
            self._model = ddp = DistributedDataParallel(
                self._job.copy(),
                init_sync=False,
                find_unused_parameters=self._has_unused,
                broadcast_buffers=candidate != SILENT,
            )
        average: Callable[[torch_private.GradBucket], Future]
        if candidate == SILENT:
            average = lambda bucket: completed(bucket.buffer())  # noqa: E731
        elif candidate.plan is None:
            average = partial(HOOKS[candidate.hook], ddp.process_group)
        else:
            self._handle = attach(ddp, candidate.plan, register=False, check_every=0, options=self._options)
            self._handle.synchronizer.events.listen(self._count)
            average = partial(self._handle.hook, None)
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self._clock.begin()

        def timed_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations as objects
            parameters = torch_private.bucket_parameters(bucket)
            timing = self._clock.ready([names[id(parameter)] for parameter in parameters], bucket.buffer())
            return average(bucket).then(lambda future: self._arrived(timing, future))

        ddp.register_comm_hook(None, timed_hook)
        for _ in range(_RESIDUAL_STEPS if candidate.gradwire else 0):
            yield

    def step(self) -> None:
        """Run a step."""
        assert self._model is not None, "switch comes first"
        sent_bytes, codec, begun = self._sent_bytes, self._codec, time.perf_counter()
        self._job.step(self._model)
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        self._clock.begin()
        assert self._clock.last is not None, "a step has passed"
        self.last = self._clock.last
        self.last.seconds = seconds
        self.last.sent_bytes, self.last.codec = self._sent_bytes - sent_bytes, self._codec - codec

    def close(self) -> None:
        """Detach what was timed last."""
        if self._handle is not None:
            self._handle.detach()
        self._handle = self._model = None

    def _arrived(self, timing: BucketTiming, future: Future) -> torch.Tensor:
        self._clock.done(timing)
        return future.value()

    def _count(self, event: Event) -> None:
        if event.kind == "send":
            self._sent_bytes += event.nbytes
        elif event.kind in ("encode", "merge", "decode"):
            self._codec += event.duration
