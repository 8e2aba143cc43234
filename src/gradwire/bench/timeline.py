"""Timeline of a step for `gradwire plan`: when each gradient is ready, measured in this process.

Times are medians over some steps of a copy of the model, on the device chosen by the user's function. On a GPU the
measurement synchronizes after each gradient, which makes the backward pass slightly longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from gradwire.bench.probe_job import ProbeJob
from gradwire.bench.probe_steps import SILENT, ReplayedSteps
from gradwire.planner import PlannedTensor
from gradwire.tuning.candidates import Candidate, planned_tensors
from gradwire.tuning.trials import Script, Trials, run_steps

MAX_STEPS = 50


@dataclass(frozen=True)
class Timeline:
    """One step.

    Attributes:
        gradients: Gradients of the trained parameters, with the seconds from the start of backward until each is ready.
        rest: Seconds of the step before and after backward.
        backward: Seconds of the backward pass.
    """

    gradients: tuple[PlannedTensor, ...]
    rest: float
    backward: float

    def lasting(self, seconds: float) -> Timeline:
        """The same step, scaled so that rest and backward take `seconds` together."""
        factor = seconds / (self.rest + self.backward)
        gradients = tuple(replace(each, ready=each.ready * factor) for each in self.gradients)
        return Timeline(gradients, self.rest * factor, self.backward * factor)


def measure(job: ProbeJob, seconds: float = 2.0) -> Timeline:
    """Time steps of a job.

    Args:
        job: Model and data.
        seconds: Approximate duration of the measurement.

    Raises:
        UserCodeError: The model raised an error.
        GradwireError: The model cannot be copied, or its output has no loss.
    """
    steps = _GradientSteps(job, largest=lambda own: own)
    trials = Trials(steps, lambda own: own, MAX_STEPS, seconds)
    run_steps(trials.run(SILENT), steps.step)
    timing = trials.timings[SILENT]
    return Timeline(tuple(planned_tensors(job.specs, timing)), timing.rest, timing.backward)


class _GradientSteps(ReplayedSteps):
    """Steps of this rank alone. Each gradient is a bucket."""

    def switch(self, candidate: Candidate) -> Script[None]:
        self._model = self._job.copy()
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._note, name))  # type: ignore[no-untyped-call]
        yield from ()

    def _note(self, name: str, parameter: torch.Tensor) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        self._clock.ready([name], parameter)
