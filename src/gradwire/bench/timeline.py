"""Timeline of a step for `gradwire plan`: when each gradient is ready, measured in this process.

Times are medians over some steps of a copy of the model, on the device chosen by the user's function. On a GPU the
measurement synchronizes after each gradient, which makes the backward pass slightly longer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from gradwire.bench.probe_job import ProbeJob
from gradwire.bench.users import users_code
from gradwire.planner import PlannedTensor

MIN_STEPS, MAX_STEPS = 3, 50
_WARM_UP = 2

Step = tuple[float, float, dict[str, float]]
"""Seconds of forward, seconds of backward, and by name the seconds from the start of backward to each gradient."""


@dataclass(frozen=True)
class Timeline:
    """One step.

    Attributes:
        gradients: Gradients of the trained parameters, with the seconds from the start of backward until each is ready.
        forward: Seconds from the start of the step to the start of backward.
        backward: Seconds from there to the end of backward.
    """

    gradients: tuple[PlannedTensor, ...]
    forward: float
    backward: float

    def lasting(self, seconds: float) -> Timeline:
        """The same step, scaled so that forward and backward take `seconds` together."""
        factor = seconds / (self.forward + self.backward)
        gradients = tuple(
            PlannedTensor(each.name, each.shape, each.dtype, each.ready * factor) for each in self.gradients
        )
        return Timeline(gradients, self.forward * factor, self.backward * factor)


def measure(job: ProbeJob, seconds: float = 2.0) -> Timeline:
    """Time steps of a job.

    Args:
        job: Model and data.
        seconds: Approximate duration of the measurement.

    Raises:
        UserCodeError: The model raised an error.
        GradwireError: The model cannot be copied, or its output has no loss.
    """
    model, ready = job.copy(), dict[str, float]()
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    on_gpu = any(parameter.is_cuda for parameter in named.values())

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def note(name: str) -> None:
        ready[name] = now()

    for name, parameter in named.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))  # type: ignore[no-untyped-call]

    def step() -> Step:
        ready.clear()
        model.zero_grad(set_to_none=True)
        begun = now()
        loss = job.forward(model)
        turned = now()
        loss.backward()  # type: ignore[no-untyped-call]
        backward = now() - turned
        return turned - begun, backward, {name: ready.get(name, turned + backward) - turned for name in named}

    with users_code(f"A step of {job.name}"):
        for _ in range(_WARM_UP):
            step()
    steps: list[Step] = []
    until = time.perf_counter() + seconds
    while len(steps) < MIN_STEPS or (len(steps) < MAX_STEPS and time.perf_counter() < until):
        steps.append(step())
    gradients = tuple(
        PlannedTensor(name, tuple(parameter.shape), parameter.dtype, median(ready[name] for _, _, ready in steps))
        for name, parameter in named.items()
    )
    return Timeline(gradients, median(found[0] for found in steps), median(found[1] for found in steps))
