"""What `gcomp` needs of the user's optimizer: slices of parameters, moments and hyper-parameters, by name and range.

Read on the engine's thread during backward, when neither parameters nor optimizer change. Nothing is copied but what
lies strided or on a GPU.
"""
# Shapes: N = elements of the range

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gradwire.compressors.gcomp_metric import RULES
from gradwire.core.errors import OptionError
from gradwire.core.spec import Range


class OptimizerState:
    """The `aux` of `gcomp`'s contexts.

    Args:
        optimizer: one of torch.optim's that `gcomp_metric.RULES` has.
        parameters: by name, those that will be asked for.

    Attributes:
        loss_scale: what gradients are scaled by until the optimizer steps.

    Raises:
        OptionError: an optimizer, or an option of it, that the metric does not cover; or a parameter that is not its.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loss_scale = 1.0
        self._optimizer = optimizer
        self._rule = RULES[_name_of(optimizer)]
        groups = [(index, id(each)) for index, group in enumerate(optimizer.param_groups) for each in group["params"]]
        by_id = {key: index for index, key in groups}
        self._parameters = {name: (parameter, by_id.get(id(parameter))) for name, parameter in parameters}
        for name, (_, index) in self._parameters.items():
            self._check(name, index)

    def __call__(self, name: str, elements: Range) -> dict[str, torch.Tensor]:
        """The slices of one range; nothing where the optimizer has no state of the parameter yet."""
        parameter, index = self._parameters[name]
        assert index is not None, "checked when the parameter was taken in"
        group, state = self._optimizer.param_groups[index], self._optimizer.state.get(parameter, {})
        moments = {"first": self._rule.first(group), "second": self._rule.second(group)}
        numbers = self._rule.numbers(group, int(state.get("step", 0)))
        if numbers is None or any(each and state.get(each) is None for each in moments.values()):
            return {}
        slices = {key: _slice(state[each], elements) for key, each in moments.items() if each}
        return {
            "parameter": _slice(parameter, elements),
            **slices,
            "numbers": torch.tensor(numbers, dtype=torch.float32),
            "loss_scale": torch.tensor(self.loss_scale),
        }

    def _check(self, name: str, index: int | None) -> None:
        if index is None:
            raise OptionError(
                f"Expected an optimizer that has every parameter under gcomp, got one without {name!r}. Do: pass the "
                'optimizer that has it, or give it another method: {"' + name + '": "lossless", "*": "gcomp"}.'
            )
        refused = self._rule.refuses(self._optimizer.param_groups[index])
        if refused:
            raise OptionError(
                f"Expected an optimizer whose update gcomp can bound, got {refused} of "
                f'{type(self._optimizer).__name__} (in the group of {name!r}). Do: leave that out, or use "lossless".'
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


def _slice(tensor: Any, elements: Range) -> torch.Tensor:
    flat: torch.Tensor = tensor.detach().reshape(-1)[elements.offset : elements.end]
    return flat.cpu() if flat.is_cuda else flat
