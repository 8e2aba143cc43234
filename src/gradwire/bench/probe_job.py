"""What `probe` and `plan` measure: a model with one batch, from a function of the user's or a built-in workload."""

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

CONTRACT = "return model, batch, with the batch a tensor, a tuple for model(*batch) or a dict for model(**batch)"


@dataclass
class ProbeJob:
    """A model and a batch.

    Attributes:
        name: for people.
        model: not wrapped; it is copied before it is used.
        batch: positional arguments of the model, or named ones.
        loss: of the model's output, a scalar; None for what the output says itself.
        means_squares: whether the output had no loss, so that its mean square was taken.
    """

    name: str
    model: nn.Module
    batch: tuple[Any, ...] | dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None = None
    means_squares: bool = False

    def step(self, model: nn.Module) -> None:
        """Forward and backward of a copy, wrapped or not."""
        model.zero_grad(set_to_none=True)
        self.forward(model).backward()  # type: ignore[no-untyped-call]

    def forward(self, model: nn.Module) -> torch.Tensor:
        """The loss of a copy, wrapped or not."""
        output = model(**self.batch) if isinstance(self.batch, dict) else model(*self.batch)
        if self.loss is not None:
            return self.loss(output)
        loss, self.means_squares = loss_of(output)
        return loss

    def copy(self) -> nn.Module:
        """The model anew."""
        try:
            return copy.deepcopy(self.model)
        except Exception as error:
            raise GradwireError(
                f"Expected a model that copy.deepcopy can copy, got {type(error).__name__}: {error}. Do: return it "
                "before its first forward, without tensors that are results of a computation."
            ) from error

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that are trained, by name."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def to(self, device: torch.device) -> ProbeJob:
        """The same on another device; the user's own objects stay where they are."""
        if device.type == "cpu":
            return self
        return ProbeJob(self.name, self.copy().to(device), _move(self.batch, device), self.loss)


def builtin(name: str, rank: int, world_size: int) -> ProbeJob:
    """A built-in workload; see `gradwire.bench.workload`."""
    workload = make_workload(name)
    torch.manual_seed(0)
    inputs, targets = workload.batch(0, 0, rank, world_size)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, targets.to(logits.device))

    return ProbeJob(workload.name, workload.model(), (inputs,), loss)


def from_user(name: str, function: Callable[[], Any]) -> ProbeJob:
    """What a function of the user's returns.

    Raises:
        OptionError: something else than a model and a batch.
        UserCodeError: the function raised.
    """
    if not callable(function):
        raise OptionError(f"Expected {name} to be a function, got {type(function).__name__}. Do: {CONTRACT}.")
    with users_code(name):
        made = function()
    if not (isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise OptionError(f"Expected model and batch of {name}, got {type(made).__name__}. Do: {CONTRACT}.")
    model, batch = made
    if isinstance(model, DistributedDataParallel):
        raise OptionError(f"Expected a model that is not wrapped, got a DDP module of {name}. Do: return model.module.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OptionError(f"Expected a model with parameters to train, got none of {name}. Do: {CONTRACT}.")
    if isinstance(batch, Mapping):
        batch = dict(batch)
    elif isinstance(batch, torch.Tensor):
        batch = (batch,)
    elif not isinstance(batch, (tuple, list)):
        raise OptionError(f"Expected a batch of {name}, got {type(batch).__name__}. Do: {CONTRACT}.")
    return ProbeJob(name, model, batch if isinstance(batch, dict) else tuple(batch))


def loss_of(output: Any) -> tuple[torch.Tensor, bool]:
    """The loss in a model's output, and whether it is the mean square of a tensor, for want of a loss.

    Raises:
        OptionError: no scalar, nothing with a field ``loss``, and no tensor.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor):
        raise OptionError(
            f"Expected an output with a loss, got {type(output).__name__}. Do: let the model return its loss, "
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
