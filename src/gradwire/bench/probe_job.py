"""The job that `probe` and `plan` measure: a model and a batch, from a user's function or a built-in workload."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench.users import users_code
from gradwire.bench.workloads import make_workload
from gradwire.core.errors import GradwireError, OptionError
from gradwire.core.spec import TensorSpec

CONTRACT = "Return model, batch, with the batch a tensor, a tuple for model(*batch) or a dict for model(**batch)."


@dataclass
class ProbeJob:
    """A model and a batch.

    Attributes:
        name: Name for people.
        model: The model, not wrapped. It is copied before use.
        batch: Positional or named arguments of the model.
        loss: Computes a scalar from the model's output. None takes the loss in the output.
        means_squares: Whether the output had no loss, so that its mean square was taken.
    """

    name: str
    model: nn.Module
    batch: tuple[Any, ...] | dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None = None
    means_squares: bool = False

    def step(self, model: nn.Module) -> None:
        """Run forward and backward of a copy, wrapped or not."""
        model.zero_grad(set_to_none=True)
        output = model(**self.batch) if isinstance(self.batch, dict) else model(*self.batch)
        if self.loss is None:
            loss, self.means_squares = loss_of(output)
        else:
            loss = self.loss(output)
        loss.backward()  # type: ignore[no-untyped-call]

    def copy(self) -> nn.Module:
        """Return a copy of the model.

        Raises:
            GradwireError: It cannot be copied.
        """
        try:
            return copy.deepcopy(self.model)
        except Exception as error:
            raise GradwireError(
                f"copy.deepcopy cannot copy the model ({type(error).__name__}: {error}). Return it before its first "
                "forward, without tensors that are results of a computation."
            ) from error

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Specs of the trained parameters by name."""
        return {name: TensorSpec.of(each) for name, each in self.model.named_parameters() if each.requires_grad}

    def to(self, device: torch.device) -> ProbeJob:
        """Return the job on another device. The user's own objects stay where they are."""
        if device.type == "cpu":
            return self
        return ProbeJob(self.name, self.copy().to(device), _move(self.batch, device), self.loss)


def builtin(name: str, rank: int, world_size: int) -> ProbeJob:
    """Return a built-in workload; see `gradwire.bench.workloads`."""
    workload = make_workload(name)
    torch.manual_seed(0)
    inputs, targets = workload.batch(0, 0, rank, world_size)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, targets.to(logits.device))

    return ProbeJob(workload.name, workload.model(), (inputs,), loss)


def from_user(name: str, function: Callable[[], Any]) -> ProbeJob:
    """Return the job that a user's function makes.

    Raises:
        OptionError: The function returned something other than a model and a batch.
        UserCodeError: The function raised.
    """
    if not callable(function):
        raise OptionError(f"{name} must be a function, not {type(function).__name__}. {CONTRACT}")
    with users_code(name):
        made = function()
    if not (isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise OptionError(f"{name} returned {type(made).__name__}, and no model and batch. {CONTRACT}")
    model, batch = made
    if isinstance(model, DistributedDataParallel):
        raise OptionError(f"The model of {name} is wrapped in DDP already. Return model.module.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OptionError(f"The model of {name} has no parameters to train. {CONTRACT}")
    if isinstance(batch, Mapping):
        batch = dict(batch)
    elif isinstance(batch, torch.Tensor):
        batch = (batch,)
    elif not isinstance(batch, (tuple, list)):
        raise OptionError(f"The batch of {name} is {type(batch).__name__}. {CONTRACT}")
    return ProbeJob(name, model, batch if isinstance(batch, dict) else tuple(batch))


def loss_of(output: Any) -> tuple[torch.Tensor, bool]:
    """Return the loss in a model's output, or the mean square of a tensor, and whether it is the latter.

    Raises:
        OptionError: The output is neither a tensor nor has a ``loss``.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor):
        raise OptionError(
            f"There is no loss in the model's output, {type(output).__name__}. Let the model return its loss, "
            'something with .loss or ["loss"], or one tensor.'
        )
    return (found.reshape(()), False) if found.numel() == 1 else (found.square().mean(), True)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _move(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        moved = [_move(item, device) for item in value]
        return moved if isinstance(value, list) else tuple(moved)
    return value
