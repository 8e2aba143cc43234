"""What `gcomp` needs of the user's optimizer: slices of parameters, moments and hyper-parameters, by name and range.

Read on the engine's thread during backward, when neither parameters nor optimizer change. Nothing is copied but what
lies strided or on a GPU.
"""
# Shapes: N = elements of the range

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gradwire.compressors.support.gcomp_metric import RULES, Numbers
from gradwire.core.errors import OptionError
from gradwire.core.spec import ElementRange
from gradwire.core.torch_private import in_bucket_order
from gradwire.ddp.clipping import is_no_change, is_power_of_two

logger = logging.getLogger("gradwire")


class OptimizerState:
    """The `aux` of `gcomp`'s contexts.

    Args:
        optimizer: one of torch.optim's that `gcomp_metric.RULES` has.
        parameters: by name, those that will be asked for.

    Attributes:
        loss_scale: what gradients are scaled by until the optimizer steps.
        clipped: whether gradients have been changed by more than a common scale before a step (see `clipping`).

    Raises:
        OptionError: an optimizer, or an option of it, that the metric does not cover; or a parameter that is not its.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loss_scale = 1.0
        self.clipped = False
        self._cut_for: dict[str, Numbers] = {}  # by name: what gradients of the step that comes were cut for
        self._again = False
        self.optimizer = optimizer
        self._rule = RULES[_name_of(optimizer)]
        groups = [(index, id(each)) for index, group in enumerate(optimizer.param_groups) for each in group["params"]]
        by_id = {key: index for index, key in groups}
        self._parameters = {name: (parameter, by_id.get(id(parameter))) for name, parameter in parameters}
        for name, (_, index) in self._parameters.items():
            self._check(name, index)

    def __call__(self, name: str, elements: ElementRange) -> dict[str, torch.Tensor]:
        """The slices of one range that is encoded; nothing where an earlier backward of this step had the bound.

        Nothing of a parameter that was frozen at attach, either: its gradient is not cut.
        """
        if self._again or name not in self._parameters:
            return {}
        numbers = self._numbers(name)
        slices = self._slices(name, elements, numbers)
        if slices and numbers is not None:
            self._cut_for[name] = numbers
        return slices

    def begin_backward(self) -> None:
        """Say that gradients are about to be encoded, for the first time since the optimizer's step or once more."""
        self._again = bool(self._cut_for)

    def before_step(self, factors: Sequence[float]) -> None:
        """Hold what was cut to what is applied.

        Args:
            factors: what averaged gradients were multiplied by, see `AfterAveraging.factors`.

        Raises:
            OptionError: by more than 1, or with other hyper-parameters: nothing holds then of what was bounded.
        """
        cut_for, self._cut_for = self._cut_for, {}
        for name, numbers in cut_for.items():
            self._check_numbers(name, numbers)
        for factor in factors:
            self._note(factor, bool(cut_for))

    def slices(self, name: str, elements: ElementRange) -> dict[str, torch.Tensor]:
        """The slices of one range; nothing where the optimizer has no state of the parameter yet."""
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
            "numbers": torch.tensor(numbers, dtype=torch.float32),
            "loss_scale": torch.tensor(self.loss_scale),
            "clipped": torch.tensor(self.clipped),
        }

    def _group(self, name: str) -> dict[str, Any]:
        index = self._parameters[name][1]
        assert index is not None, "checked when the parameter was taken in"
        return self.optimizer.param_groups[index]

    def _numbers(self, name: str) -> Numbers | None:
        steps = self.optimizer.state.get(self._parameters[name][0], {}).get("step", 0)
        return self._rule.numbers(self._group(name), int(steps))

    def _note(self, factor: float, was_cut: bool) -> None:
        # Gradients were cut for a division by the loss scale. A fused optimizer divides in its step.
        applied = 1.0 if is_no_change(factor) else factor * self.loss_scale
        if is_no_change(applied) or (applied < 1 and is_power_of_two(applied)):
            return
        if applied > 1:
            if was_cut:
                raise OptionError(
                    f"Expected gradients as they were averaged in the optimizer's step, got them times {applied:.6g}; "
                    'gcomp has cut them for smaller steps. Do: multiply the loss, or use "lossless".'
                )
        elif not self.clipped:
            self.clipped = True
            how = "changed" if math.isnan(applied) else f"multiplied by {applied:.6g}"
            logger.log(
                logging.WARNING if was_cut else logging.INFO,
                "Averaged gradients were %s before the optimizer's step (clip_grad_norm_?). Their norm depends on what "
                "gcomp has cut: it cuts at most 6 bits from now on, of 16-bit ones none. "
                'Do: gw.make("gcomp", clipped=True), to have that from the first step on.',
                how,
            )

    def _check_numbers(self, name: str, cut_for: Numbers) -> None:
        now = self._numbers(name)
        if now is not None and not cut_for.allow(now):
            raise OptionError(
                f"Expected hyper-parameters in the optimizer's step as backward found them, got larger steps (of "
                f"{name!r}, now at lr={self._group(name)['lr']:.6g}); gcomp has cut gradients for the smaller ones. "
                'Do: set them before backward, or use "lossless".'
            )

    def _check(self, name: str, index: int | None) -> None:
        if index is None:
            raise OptionError(
                f"Expected an optimizer that has every parameter under gcomp, got one without {name!r}. Do: pass the "
                'optimizer that has it, or give it another method: {"' + name + '": "lossless", "*": "gcomp"}.'
            )
        refused = self._rule.refuses(self.optimizer.param_groups[index])
        if refused:
            raise OptionError(
                f"Expected an optimizer whose update gcomp can bound, got {refused} of "
                f'{type(self.optimizer).__name__} (in the group of {name!r}). Do: leave that out, or use "lossless".'
            )


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__
    # A subclass may update in another way.
    if name not in RULES or type(optimizer) is not getattr(torch.optim, name):
        raise OptionError(
            f"Expected an optimizer of torch.optim whose update gcomp knows ({', '.join(sorted(RULES))}; SGD with and "
            f'without momentum and Nesterov), got {type(optimizer).__qualname__}. Do: use one of these, or "lossless", '
            "which needs no optimizer."
        )
    return name


def _slice(tensor: torch.Tensor, parameter: torch.Tensor, elements: ElementRange) -> torch.Tensor:
    flat = in_bucket_order(tensor.detach(), parameter)[elements.offset : elements.end]
    return flat.cpu() if flat.is_cuda else flat
