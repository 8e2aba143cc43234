"""What a worker is given, as the protocol has it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradwire.compressors.base import Compressor
from gradwire.core.errors import FrameError, OptionError
from gradwire.core.optimizers import optimizers_of
from gradwire.core.spec import TensorSpec
from gradwire.parameter_server.session import Groups, groups_from
from gradwire.sync.plan import Plan

logger = logging.getLogger("gradwire")

Methods = str | Compressor | dict[str, str | Compressor]


def one_optimizer(given: object) -> torch.optim.Optimizer:
    """The optimizer that a user means.

    Raises:
        OptionTypeError: see `optimizers_of`.
        OptionError: several.
    """
    optimizers = optimizers_of(given)
    if len(optimizers) > 1:
        raise OptionError(
            f"Parameter servers step one optimizer, but here are {len(optimizers)}. Make one, with a group of "
            'parameters for each: torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.01}]).'
        )
    return optimizers[0]


def log_notes(specs: Mapping[str, TensorSpec], *plans: Plan) -> None:
    """Log what the plans note of these tensors, each note once."""
    for note in dict.fromkeys(note for plan in plans for note in plan.notes(specs)):
        logger.warning("%s", note)


def hyper_parameters(optimizer: torch.optim.Optimizer) -> Groups:
    """The hyper-parameters of an optimizer's groups, as they are now.

    Raises:
        OptionError: one of them is not plain.
    """
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    try:
        return groups_from(groups)
    except FrameError as error:
        raise OptionError(
            f"Expected hyper-parameters that are numbers, flags or texts, got {groups}. Do: pass lr as a float."
        ) from error


def addresses_of(servers: str | Sequence[str] | None) -> list[tuple[str, int]]:
    said = os.environ.get("GRADWIRE_SERVERS", "") if servers is None else servers
    texts = [text.strip() for text in said.split(",")] if isinstance(said, str) else list(said)
    found = []
    for text in texts:
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdigit():
            raise OptionError(
                f"Expected servers as host:port, got {text!r}. Do: pass them, or set GRADWIRE_SERVERS=host:port."
            )
        found.append((host.strip("[]"), int(port)))
    return found


def number(name: str, value: int | None, variable: str) -> int:
    said = os.environ.get(variable) if value is None else value
    if said is None:
        raise OptionError(f"Expected {name}, got none. Do: pass {name}=, or set {variable} (as torchrun does).")
    return int(said)


def class_name(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    return kind.__name__ if getattr(torch.optim, kind.__name__, None) is kind else f"{kind.__module__}.{kind.__name__}"


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return list(value) if isinstance(value, tuple) else value
