"""Turns a worker's model, optimizer and plans into what it tells the servers."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from gradwire.compressors.base.registry import DENSE_NAME, spec_of
from gradwire.core.errors import AttachError, FrameError, OptionError, OptionTypeError
from gradwire.core.optimizers import optimizers_of
from gradwire.core.spec import TensorSpec
from gradwire.parameter_server.chunks import ParameterChunk
from gradwire.parameter_server.session import Groups, ParameterConfig, check_groups
from gradwire.sync.plan import Plan

logger = logging.getLogger("gradwire")


def one_optimizer(given: object) -> torch.optim.Optimizer:
    """The one optimizer in an argument.

    Raises:
        OptionTypeError: See `optimizers_of`.
        OptionError: There are several.
    """
    optimizers = optimizers_of(given)
    if len(optimizers) > 1:
        raise OptionError(
            f"Parameter servers step one optimizer, but here are {len(optimizers)}. Make one, with a group of "
            'parameters for each: torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.01}]).'
        )
    return optimizers[0]


def check_options(name: str, given: object, kind: type[Any]) -> None:
    """Check that the argument `name` is an instance of its options dataclass.

    Raises:
        OptionTypeError: It is something else.
    """
    if not isinstance(given, kind):
        values = given if isinstance(given, dict) else {fields(kind)[0].name: given}
        passed = ", ".join(f"{key}={value!r}" for key, value in values.items())
        raise OptionTypeError(
            f"{name} takes a {kind.__name__}, not {given!r}. Pass {name}=gradwire.{kind.__name__}({passed})."
        )


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Name of the optimizer's class in `torch.optim`, or its import path."""
    kind = type(optimizer)
    return kind.__name__ if getattr(torch.optim, kind.__name__, None) is kind else f"{kind.__module__}.{kind.__name__}"


def hyperparameters(optimizer: torch.optim.Optimizer) -> Groups:
    """Current hyperparameters of each parameter group.

    Raises:
        OptionError: One is not a number, a flag or a string.
    """
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    try:
        return check_groups(groups)
    except FrameError as error:
        raise OptionError(
            f"Only numbers, flags and strings can be sent as hyperparameters, but the optimizer has {groups}. Pass lr "
            "as a float."
        ) from error


def parameter_config(
    chunk: ParameterChunk, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, plan: Plan,
    pull_plan: Plan,
) -> ParameterConfig:  # fmt: skip
    """How a chunk of the model is kept and encoded.

    Raises:
        AttachError: The optimizer does not have the parameter.
    """
    name = chunk.parameters[0]
    parameter = parameters[name]
    push, pull = (each.entry(name, TensorSpec.of(parameter)) for each in (plan, pull_plan))
    spec = TensorSpec.of(chunk.of(parameters))
    for index, group in enumerate(optimizer.param_groups):
        if any(parameter is each for each in group["params"]):
            return ParameterConfig(
                chunk.name, spec.shape, str(spec.dtype).removeprefix("torch."), spec_of(push.compressor),
                spec_of(pull.compressor), index, push.feedback != "none", pull.feedback != "none" or
                pull.compressor.exact,
            )  # fmt: skip
    raise AttachError(
        f"The optimizer does not have {name!r}, which requires a gradient. Build the optimizer from "
        "model.parameters(), or freeze this parameter with requires_grad_(False)."
    )


def joined_kind(config: ParameterConfig) -> Hashable:
    """What vectors that travel as one tensor have in common; None for one that is compressed."""
    dense = config.push == config.pull == DENSE_NAME
    return replace(config, name="", shape=()) if dense else None


def log_notes(specs: Mapping[str, TensorSpec], *plans: Plan) -> None:
    """Log each note of the plans once."""
    for note in dict.fromkeys(note for plan in plans for note in plan.notes(specs)):
        logger.warning("%s", note)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return list(value) if isinstance(value, tuple) else value
