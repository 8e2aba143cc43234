"""Momentum is applied once: by momentum correction before sparsification, or by the optimizer, and not by both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gradwire.core.errors import AttachError
from gradwire.core.spec import TensorSpec
from gradwire.residuals import policies
from gradwire.sync.plan import Plan

_ADVICE = (
    "Do: pass feedback=gradwire.MomentumCorrection.of(optimizer), which takes the momentum out of a torch.optim.SGD; "
    "or make the optimizer without momentum, as torch.optim.SGD(parameters, lr), and pass "
    'feedback="momentum:momentum=0.9".'
)


def check_momentum(
    plan: Plan, optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> None:
    """Raise unless the optimizers have no momentum for the parameters that are momentum-corrected.

    Args:
        plan: says which they are.
        optimizers: all of these parameters.
        parameters: by name.

    Raises:
        AttachError: an optimizer has momentum too, or none was given, so that there is no telling.
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
            "Expected optimizer= with momentum correction, got none, so that momentum might be applied twice. "
            f"Do: pass the optimizer of these parameters to attach. {_ADVICE}"
        )
    for optimizer, group in ((each, group) for each in optimizers for group in each.param_groups):
        names = [corrected[id(parameter)] for parameter in group["params"] if id(parameter) in corrected]
        if names and (group.get("momentum") or "betas" in group):
            has = f"momentum={group['momentum']}" if group.get("momentum") else f"betas={group['betas']}"
            raise AttachError(
                "Expected an optimizer without momentum beside momentum correction, got "
                f"{type(optimizer).__name__} with {has} for {names[0]!r}: momentum would be applied twice. {_ADVICE}"
            )
