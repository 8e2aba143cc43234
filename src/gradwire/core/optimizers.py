"""The optimizers that a user passes: one, several, or the wrappers of other libraries."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LRScheduler

from gradwire.core.errors import OptionTypeError


def optimizers_of(given: object) -> list[torch.optim.Optimizer]:
    """Return the optimizers in `given`, each once, in the same order.

    Args:
        given: A `torch.optim.Optimizer`, a wrapper with one in its attribute ``optimizer`` (Accelerate, Lightning), or
            a list of these.

    Raises:
        OptionTypeError: The argument is something else, or an empty list.
    """
    found = [_one(each) for each in (given if isinstance(given, (list, tuple)) else [given])]
    if not found:
        raise OptionTypeError("The list of optimizers is empty. Pass the optimizers of the parameters, or None.")
    return list({id(each): each for each in found}.values())


def _one(given: object) -> torch.optim.Optimizer:
    if isinstance(given, type):
        raise OptionTypeError(
            f"optimizer= is the class {given.__name__}, not an optimizer. Make one: {given.__name__}(ddp.parameters())."
        )
    if isinstance(given, LRScheduler):
        raise OptionTypeError(f"optimizer= is a scheduler, {type(given).__name__}. Pass scheduler.optimizer.")
    if isinstance(given, torch.optim.Optimizer) and _takes_hooks(given):
        return given
    inner = getattr(given, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return _one(inner)
    raise OptionTypeError(
        f"optimizer= takes a torch.optim.Optimizer, or a list of them, but this is of type {type(given).__name__}."
    )


def _takes_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks can be registered: a wrapper may be a subclass that never called the constructor."""
    try:
        optimizer.register_step_post_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return True
