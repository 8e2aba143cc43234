"""Forward hooks that bring each parameter up to date before it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class ForwardPulls:
    """Pulls each parameter before the forward pass of the module that owns it.

    Parameters whose module was not called in earlier forward passes may be read elsewhere: they are pulled before the
    forward pass of the whole model. What is still outdated after a forward pass is pulled then. If a module is called
    without the model, what other modules own stays outdated until the step ends.

    Args:
        parameters: Parameters of the model by name.
        begin: Called before each forward pass of the model, and before the first one of a module in a step.
        pull: Brings one parameter up to date, by name.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], begin: Callable[[], None], pull: Callable[[str], None]
    ) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._begin = begin
        self._pull_now = pull
        self._outdated = set(parameters)
        self._begun = False  # since parameters were outdated
        self._module_pulled: set[str] = set()  # by the hook of their module, in every forward pass so far
        self._reached: set[str] = set()  # by the hook of their module, in this forward pass
        self._hooks: list[Any] = []

    def install(self, model: torch.nn.Module, *, fine_grained: bool) -> None:
        """Register the hooks.

        Args:
            model: Model of the parameters.
            fine_grained: If false, all parameters are pulled before the model's forward pass.
        """
        self._hooks.append(model.register_forward_pre_hook(self._before_model))
        self._hooks.append(model.register_forward_hook(self._after_model))
        for module in model.modules() if fine_grained else ():
            owned = [self._names[p] for p in module.parameters(recurse=False) if p in self._names]
            if owned and module is not model:
                self._hooks.append(module.register_forward_pre_hook(self._before_module(owned)))

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()

    def mark_outdated(self) -> None:
        """Pull all parameters again when they are next read."""
        self._outdated = set(self._names.values())
        self._begun = False

    def is_outdated(self, name: str) -> bool:
        """Whether a parameter has not been pulled since it was outdated."""
        return name in self._outdated

    def pull(self, name: str) -> None:
        """Bring a parameter up to date if it is not."""
        if name in self._outdated:
            self._pull_now(name)
            self._outdated.discard(name)

    def pull_all(self) -> None:
        """Bring all parameters up to date."""
        for name in list(self._outdated):
            self.pull(name)

    def _begin_pass(self) -> None:
        self._begin()  # may outdate parameters
        self._begun = True

    def _before_model(self, module: torch.nn.Module, inputs: Any) -> None:
        self._begin_pass()
        for name in self._outdated - self._module_pulled:
            self.pull(name)
        self._reached.clear()

    def _after_model(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        first = not self._module_pulled
        self._module_pulled = self._reached.copy() if first else self._module_pulled & (self._reached | self._outdated)
        self.pull_all()

    def _before_module(self, owned: Sequence[str]) -> Callable[[torch.nn.Module, Any], None]:
        def hook(module: torch.nn.Module, inputs: Any) -> None:
            if not self._begun:
                self._begin_pass()
            for name in owned:
                self.pull(name)
                self._reached.add(name)

        return hook
