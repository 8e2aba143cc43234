"""Who applies momentum, and that it is applied once: by momentum correction on each rank, or by the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from gradwire.core.errors import AttachError, OptionError
from gradwire.core.spec import TensorSpec
from gradwire.residuals import policies
from gradwire.residuals.transaction import Residuals
from gradwire.sync.plan import Plan

logger = logging.getLogger("gradwire")

_ADVICE = (
    "Pass gradwire.Plan(..., feedback=gradwire.MomentumCorrection.of(optimizer)), which takes the momentum out of a "
    "torch.optim.SGD. Or create the optimizer without momentum, torch.optim.SGD(parameters, lr), and pass "
    'feedback="momentum:momentum=0.9" to the plan.'
)

_SINCE_ATTACH = (
    "The optimizer had none at attach. If optimizer.load_state_dict() has loaded a run without momentum correction, "
    "set momentum to 0 in each of optimizer.param_groups afterwards. If a scheduler such as OneCycleLR changes "
    "momentum, pass cycle_momentum=False to it. If the plan was changed, use one without momentum correction."
)


def may_have_momentum(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer applies momentum to averaged gradients, or may do so because it is not known."""
    groups = [group for each in optimizers for group in each.param_groups]
    return not groups or any(_has_momentum(group) for group in groups)


def _has_momentum(group: Mapping[str, Any]) -> bool:
    return bool(group.get("momentum")) or "betas" in group


class MomentumCheck:
    """Finds momentum that would be applied twice: by momentum correction and by an optimizer.

    Args:
        parameters: Parameters by name.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._parameters = list(parameters)
        self._plan: Plan | None = None
        self._has_warned = False
        self._names: dict[int, str] = {}  # of the corrected parameters under `_plan`, by id

    def add(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Look at further parameters from now on: those that were frozen at attach, and are trained."""
        self._parameters.extend(parameters)
        self._plan = None

    def at_attach(self, plan: Plan, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Check all optimizers of the parameters.

        Raises:
            AttachError: One of them has momentum for a parameter under momentum correction, or none was given.
        """
        if self._corrected(plan) and not optimizers:
            raise AttachError(
                "With momentum correction, attach needs optimizer= to check that momentum is not applied twice. "
                f"Pass the optimizer of these parameters. {_ADVICE}"
            )
        for optimizer in optimizers:
            self._check(plan, optimizer, _ADVICE)

    def before_step(self, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer again before it steps. Without momentum, that is one look at each of its groups.

        Raises:
            AttachError: As in `at_attach`.
        """
        if may_have_momentum([optimizer]):
            self._check(plan, optimizer, _SINCE_ATTACH)

    def before_backward(self, plan: Plan, residuals: Residuals, *, any_step: bool) -> None:
        """Check that a synchronized backward pass is the only one of its step: each one advances the velocities.

        Args:
            plan: The plan.
            residuals: Residuals of this rank.
            any_step: Whether any optimizer has stepped since the pass before. Then there is a warning, once.

        Raises:
            OptionError: No optimizer has applied the means of the pass before.
        """
        if not (plan.has_velocity and residuals.is_open and residuals.has_open_velocity):
            return
        if not any_step:
            raise OptionError(
                "Momentum correction advances its velocities in each synchronized backward pass, and the optimizer has "
                "not stepped since the last one. Run all backwards of a step but the last under ddp.no_sync(). If the "
                "gradients of the last one were thrown away, call handle.rollback(). If another optimizer was created "
                "after attach, detach and attach with that one."
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Momentum correction advances its velocities in each synchronized backward pass, also those of "
                "parameters whose optimizer has not stepped since the last one. Their momentum counts more than once. "
                "Let each optimizer step after each backward, or choose another feedback for these parameters."
            )

    def _check(self, plan: Plan, optimizer: torch.optim.Optimizer, advice: str) -> None:
        corrected = self._corrected(plan)
        for group in optimizer.param_groups if corrected else ():
            names = [corrected[id(parameter)] for parameter in group["params"] if id(parameter) in corrected]
            if names and _has_momentum(group):
                has = f"momentum={group['momentum']}" if group.get("momentum") else f"betas={group['betas']}"
                raise AttachError(
                    f"The plan has momentum correction, and the optimizer is {type(optimizer).__name__} with {has} "
                    f"for {names[0]!r}: momentum would be applied twice. {advice}"
                )

    def _corrected(self, plan: Plan) -> Mapping[int, str]:
        if plan is not self._plan:
            self._plan = plan
            self._names = {
                id(parameter): name
                for name, parameter in self._parameters
                if policies.get(plan.entry(name, TensorSpec.of(parameter)).feedback).has_velocity
            }
        return self._names
