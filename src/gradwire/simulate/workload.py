"""The model of a simulated step: its gradients, when each is ready, and what else a rank computes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gradwire.core.errors import OptionError
from gradwire.core.spec import TensorSpec
from gradwire.simulate.models import ModelShape


@dataclass(frozen=True)
class SimulatedGradient:
    """One gradient of a backward pass.

    Attributes:
        name: Name of its parameter.
        shape: Its shape.
        ready_seconds: When it is ready, in seconds from the beginning of the backward pass.
        dtype: Its element type.
    """

    name: str
    shape: tuple[int, ...]
    ready_seconds: float = 0.0
    dtype: torch.dtype = torch.float32

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, self.dtype)


@dataclass(frozen=True)
class Compute:
    """Seconds that a typical rank computes in a step, without any communication.

    Attributes:
        forward_seconds: Seconds of the forward pass.
        backward_seconds: Seconds of the backward pass; 0 for a backward pass that ends with its last gradient.
        optimizer_seconds: Seconds of the optimizer's step.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0

    def __post_init__(self) -> None:
        if min(self.forward_seconds, self.backward_seconds, self.optimizer_seconds) < 0:
            raise OptionError(f"Compute times are negative: {self}. Pass seconds of at least 0.")

    @property
    def total_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.optimizer_seconds


@dataclass(frozen=True)
class SimulatedModel:
    """A model as its synchronization sees it.

    Attributes:
        gradients: Gradients in the order in which the backward pass computes them.
        compute: Compute times of a typical rank.
        bucket_bytes: Bytes of a DDP bucket. Each bucket is submitted with its last gradient. None submits every
            gradient by itself.
        name: Name in tables and plots.

    Raises:
        OptionError: Gradients are not in the order of their times, or the last is ready after the backward pass.
    """

    gradients: Sequence[SimulatedGradient]
    compute: Compute = Compute()
    bucket_bytes: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        times = [0.0, *(grad.ready_seconds for grad in self.gradients)]
        if not self.compute.backward_seconds:
            object.__setattr__(self, "compute", replace(self.compute, backward_seconds=max(times)))
        for before, after in itertools.pairwise([*times, self.compute.backward_seconds]):
            if after < before * (1 - 1e-9):
                raise OptionError(
                    f"Gradients are out of order: {before:g} s comes before {after:g} s, which may be the end of the "
                    "backward pass. Sort them by ready_seconds, and check backward_seconds."
                )

    @classmethod
    def of(cls, model: ModelShape, compute: Compute, bucket_bytes: float | None = None) -> SimulatedModel:
        """A known model. Its gradients spread over the backward pass by the work of their layers."""
        gradients = [
            SimulatedGradient(tensor.name, tensor.shape, share * compute.backward_seconds)
            for tensor, share in model.backward()
        ]
        return cls(gradients, compute, bucket_bytes, model.name)
