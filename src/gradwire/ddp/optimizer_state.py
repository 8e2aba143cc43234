"""State of the user's optimizer for `gcomp`: slices of parameters, moments and hyper-parameters, by name and range.

Read on the engine's thread during backward, when neither parameters nor optimizer change. Only strided tensors and
those on a GPU are copied.
"""
# Shapes: N = elements of the range

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from gradwire.compressors.support.gcomp_metric import RULES, Numbers
from gradwire.core import host
from gradwire.core.errors import OptionError
from gradwire.core.spec import ElementRange
from gradwire.core.torch_private import in_bucket_order
from gradwire.ddp.clipping import is_no_change, is_power_of_two

logger = logging.getLogger("gradwire")


class OptimizerState:
    """The `aux` of `gcomp`'s contexts.

    Args:
        optimizer: Optimizer of torch.optim that `gcomp_metric.RULES` has.
        parameters: Parameters under `gcomp`, by name.
        lasting: Names of those for which the highest rate counts that a scheduler has recorded, not the current one.

    Attributes:
        loss_scale: Factor by which gradients are scaled until the optimizer steps.
        clipped: Whether gradients were changed by more than a common scale before a step (see `clipping`).
        common: Whether all ranks have the same parameters and optimizer state, as far as is known.
        rates: Learning rate of each parameter group in the last step, by index of the group.

    Raises:
        OptionError: `gcomp` does not know the update of the optimizer or of one of its options, or a parameter is not
            one of the optimizer's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[tuple[str, torch.Tensor]],
        lasting: Collection[str] = (),
    ) -> None:
        self._lasting = frozenset(lasting)
        self.loss_scale = 1.0
        self.clipped = False
        self.common = True
        self.rates: dict[int, float] = {}
        self._cut_for: dict[str, Numbers] = {}  # hyper-parameters for which gradients of the coming step were cut
        self._again = False
        self.optimizer = optimizer
        self._rule = RULES[_name_of(optimizer)]
        groups = [(index, id(each)) for index, group in enumerate(optimizer.param_groups) for each in group["params"]]
        by_id = {key: index for index, key in groups}
        self._parameters = {name: (parameter, by_id.get(id(parameter))) for name, parameter in parameters}
        for name, (_, index) in self._parameters.items():
            self._check(name, index)

    def __call__(self, name: str, elements: ElementRange) -> dict[str, torch.Tensor]:
        """Slices for an encode of one range.

        Empty if an earlier backward pass of this step has used up the bound, or if the parameter was frozen at attach.
        The gradient is then not cut.
        """
        if self._again or name not in self._parameters:
            return {}
        numbers = self._numbers(name)
        slices = self._slices(name, elements, numbers)
        if slices and numbers is not None:
            self._cut_for[name] = numbers
        return slices

    def begin_backward(self) -> None:
        """Note that a synchronized backward pass begins."""
        self._again = bool(self._cut_for)

    def before_step(self, factors: Sequence[float]) -> None:
        """Check that the bound for which gradients were cut holds for the step.

        Args:
            factors: Factors by which averaged gradients were multiplied (see `AfterAveraging.factors`).

        Raises:
            OptionError: A factor is above 1, or hyper-parameters have changed to larger steps.
        """
        cut_for, self._cut_for = self._cut_for, {}
        for name, numbers in cut_for.items():
            self._check_numbers(name, numbers)
        for factor in factors:
            self._note(factor, bool(cut_for))
        self._end_step()

    def skip_step(self) -> None:
        """Forget what was cut for a step that is skipped."""
        self._cut_for = {}
        self._end_step()

    def throw_away(self, names: Collection[str] | None) -> None:
        """Forget what was cut of gradients that were thrown away. None means those of all parameters."""
        self._cut_for = {} if names is None else {k: v for k, v in self._cut_for.items() if k not in names}

    def _end_step(self) -> None:
        self.rates = {index: float(group["lr"]) for index, group in enumerate(self.optimizer.param_groups)}

    def slices(self, name: str, elements: ElementRange) -> dict[str, torch.Tensor]:
        """Slices of one range. Empty if the optimizer has no state for the parameter yet."""
        return self._slices(name, elements, self._numbers(name)) if name in self._parameters else {}

    def _slices(self, name: str, elements: ElementRange, numbers: Numbers | None) -> dict[str, torch.Tensor]:
        parameter, _ = self._parameters[name]
        group, state = self._group(name), self.optimizer.state.get(parameter, {})
        moments = {"first": self._rule.first(group), "second": self._rule.second(group)}
        if numbers is None or any(each and state.get(each) is None for each in moments.values()):
            return {}
        slices = {key: _slice(state[each], parameter, elements) for key, each in moments.items() if each}
        return {
            "parameter": _slice(parameter, parameter, elements),
            **slices,
            "numbers": host.tensor(numbers),
            "loss_scale": host.tensor(self.loss_scale),
            "clipped": host.tensor(self.clipped, torch.bool),
            "common": host.tensor(self.common, torch.bool),
        }

    def _group(self, name: str) -> dict[str, Any]:
        index = self._parameters[name][1]
        assert index is not None, "checked by the constructor"
        return self.optimizer.param_groups[index]

    def _numbers(self, name: str) -> Numbers | None:
        steps = self.optimizer.state.get(self._parameters[name][0], {}).get("step", 0)
        return self._rule.numbers(self._group(name), int(steps), self._rate(name))

    def _rate(self, name: str) -> float:
        """Learning rate that counts with moments, which remember a gradient in later steps."""
        group, last = self._group(name), self.rates.get(self._parameters[name][1] or 0)
        rate = float(group["lr"])
        lasting = max(rate, float(group.get("initial_lr", 0.0)), float(group.get("max_lr", 0.0)))
        rises = rate < lasting if last is None else rate > last
        return lasting if rises or not rate or name in self._lasting else rate

    def _note(self, factor: float, was_cut: bool) -> None:
        # Gradients were cut assuming a division by the loss scale. A fused optimizer divides in its step.
        applied = 1.0 if is_no_change(factor) else factor * self.loss_scale
        if is_no_change(applied) or (applied < 1 and is_power_of_two(applied)):
            return
        if applied > 1:
            if was_cut:
                raise OptionError(
                    f"Averaged gradients were multiplied by {applied:.6g} before the optimizer's step, but gcomp has "
                    'cut them for a smaller step. Multiply the loss instead, or use "lossless".'
                )
        elif not self.clipped:
            self.clipped = True
            how = "changed" if math.isnan(applied) else f"multiplied by {applied:.6g}"
            logger.log(
                logging.WARNING if was_cut else logging.INFO,
                "Averaged gradients were %s before the optimizer's step (clip_grad_norm_?). Their norm depends on what "
                "gcomp has cut, so from now on it cuts at most 7 bits, and none of 16-bit gradients. "
                'Use gw.make("gcomp", clipped=True) to have that from the first step on.',
                how,
            )

    def _check_numbers(self, name: str, cut_for: Numbers) -> None:
        now = self._numbers(name)
        if now is not None and not cut_for.allow(now):
            raise OptionError(
                f"The optimizer's hyper-parameters for {name!r} have changed since backward (lr is now "
                f"{self._group(name)['lr']:.6g}), and gcomp has cut gradients for smaller steps. "
                'Set them before backward, or use "lossless".'
            )

    def _check(self, name: str, index: int | None) -> None:
        if index is None:
            raise OptionError(
                f"gcomp needs the optimizer of {name!r}, but this one does not have it. Pass the one that has it, or "
                f'choose another method: {{"{name}": "lossless", "*": "gcomp"}}.'
            )
        refused = self._rule.refuses(self.optimizer.param_groups[index])
        if refused:
            raise OptionError(
                f"gcomp cannot bound the update of {type(self.optimizer).__name__} with {refused} (in the group of "
                f'{name!r}). Leave that option out, or use "lossless".'
            )


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__
    # A subclass may update in another way.
    if name not in RULES or type(optimizer) is not getattr(torch.optim, name):
        raise OptionError(
            f"gcomp does not know the update of {type(optimizer).__qualname__}. Use one of these optimizers of "
            f'torch.optim, {", ".join(sorted(RULES))}, or "lossless", which needs no optimizer.'
        )
    return name


def _slice(tensor: torch.Tensor, parameter: torch.Tensor, elements: ElementRange) -> torch.Tensor:
    flat = in_bucket_order(tensor.detach(), parameter)[elements.offset : elements.end]
    return flat.cpu() if flat.is_cuda else flat
