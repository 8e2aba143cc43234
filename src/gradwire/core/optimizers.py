"""The optimizers that a user means: one, several, or what libraries wrap around one."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LRScheduler

from gradwire.core.errors import OptionTypeError


def optimizers_of(given: object) -> list[torch.optim.Optimizer]:
    """The optimizers in `given`, each once, in its order.

    Args:
        given: a `torch.optim.Optimizer`, or a wrapper that has one as its ``optimizer``, as those of Accelerate and
            Lightning do; or a list of these.

    Raises:
        OptionTypeError: something else, or an empty list.
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
    """Whether it is an optimizer of its own: a wrapper may be a subclass that never called the constructor."""
    try:
        optimizer.register_step_post_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return True
