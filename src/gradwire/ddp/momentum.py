"""Who applies momentum, and that it is applied once: by momentum correction on each rank, or by the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from gradwire.core.errors import AttachError
from gradwire.core.spec import TensorSpec
from gradwire.residuals import policies
from gradwire.sync.plan import Plan

_ADVICE = (
    "Pass gradwire.Plan(..., feedback=gradwire.MomentumCorrection.of(optimizer)), which takes the momentum out of a "
    "torch.optim.SGD. Or create the optimizer without momentum, torch.optim.SGD(parameters, lr), and pass "
    'feedback="momentum:momentum=0.9" to the plan.'
)


def may_have_momentum(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer applies momentum to averaged gradients, or may do so because it is not known."""
    groups = [group for each in optimizers for group in each.param_groups]
    return not groups or any(_has_momentum(group) for group in groups)


def _has_momentum(group: Mapping[str, Any]) -> bool:
    return bool(group.get("momentum")) or "betas" in group


def check_momentum(
    plan: Plan, optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> None:
    """Check that no optimizer has momentum for a parameter under momentum correction.

    Args:
        plan: Plan of the parameters.
        optimizers: All optimizers of the parameters.
        parameters: Parameters by name.

    Raises:
        AttachError: An optimizer has momentum too, or no optimizer was given.
    """
    corrected = {
        id(parameter): name
        for name, parameter in parameters
        if policies.get(plan.entry(name, TensorSpec.of(parameter)).feedback).has_velocity
    }
    if not corrected:
        return
    if not optimizers:
        raise AttachError(
            "With momentum correction, attach needs optimizer= to check that momentum is not applied twice. "
            f"Pass the optimizer of these parameters. {_ADVICE}"
        )
    for optimizer, group in ((each, group) for each in optimizers for group in each.param_groups):
        names = [corrected[id(parameter)] for parameter in group["params"] if id(parameter) in corrected]
        if names and _has_momentum(group):
            has = f"momentum={group['momentum']}" if group.get("momentum") else f"betas={group['betas']}"
            raise AttachError(
                f"The plan has momentum correction, and the optimizer is {type(optimizer).__name__} with {has} for "
                f"{names[0]!r}: momentum would be applied twice. {_ADVICE}"
            )
