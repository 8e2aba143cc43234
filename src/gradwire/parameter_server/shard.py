"""A server's part of the model: parameters, their optimizer, and what the workers have of them.

The values that workers hold are kept beside the parameters: their difference is the error buffer of the pull, and what
a worker gets that returns.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 3: one compression of a change is shared by all pulls. Differences:
the error buffer is not kept as such but as the parameter less the buffer, which nothing can drift away from; without
feedback the change of this step alone is sent, as there.
"""

# Shapes: N = elements of a parameter.

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gradwire.core.errors import FrameError, OptionError, PayloadError
from gradwire.core.spec import TensorSpec
from gradwire.parameter_server.session import Groups, TrainingConfig
from gradwire.parameter_server.slot import body_of, values_of
from gradwire.parameter_server.update import add_change, pull_context, push_context
from gradwire.wire.payload import Payload

CHECKED_GROUPS = 16
"""So many hyper-parameters are remembered as good: all workers tell the same, one after another."""
_WHOLE_MODEL = ("LBFGS", "SparseAdam")


def optimizer_class(name: str, allowed: tuple[str, ...] = ()) -> type[torch.optim.Optimizer]:
    """The optimizer that a worker names.

    Args:
        name: of a class in `torch.optim`, or the import path of one.
        allowed: import paths that may be loaded: whoever starts the server says which.

    Raises:
        OptionError: no such class, one that needs the whole model in one step, or one that is not allowed.
    """
    if name in allowed:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute, None)
    else:
        found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)) or name in _WHOLE_MODEL:
        raise OptionError(
            f"Expected an optimizer of torch.optim that steps each parameter by itself, got {name!r}. Do: use one, or "
            "start the server with --optimizer and the import path of yours."
        )
    return found


class ParameterShard:
    """The parameters of one server. One thread at a time.

    Args:
        allowed: see `optimizer_class`.

    Attributes:
        agreement: set before anything else.
        parameters: by tensor id.
        views: the same as the workers have them.
        optimizers: one a parameter, so that each can step by itself.
    """

    def __init__(self, allowed: tuple[str, ...] = ()) -> None:
        self.agreement: TrainingConfig | None = None
        self.parameters: dict[int, torch.nn.Parameter] = {}
        self.views: dict[int, torch.Tensor] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self._allowed = allowed
        self._first_groups: Groups | None = None
        self._checked: deque[Groups] = deque(maxlen=CHECKED_GROUPS)

    def check(self, agreement: TrainingConfig, groups: Groups) -> None:
        """Refuse hyper-parameters with which a step would fail, by steps of parameters of one element.

        The first of them are those of hyper-parameters that were there before, as some cannot be changed later.

        Raises:
            FrameError: the optimizer does not take them, or there is no such optimizer.
        """
        if _but_rates(groups) in self._checked:
            return
        first = groups if self._first_groups is None or not self.optimizers else self._first_groups
        try:
            for number, dimensions, dtype in agreement.sorts:
                spec = TensorSpec((1,) * dimensions, getattr(torch, dtype))
                parameter = torch.nn.Parameter(torch.ones(spec.shape, dtype=spec.dtype))
                optimizer = _new_optimizer(agreement.optimizer, self._allowed, parameter, _wanted(first[number]))
                for group in (first[number], groups[number], groups[number]):
                    optimizer.param_groups[0].update(_wanted(group))
                    parameter.grad = torch.ones_like(parameter)
                    optimizer.step()
        except Exception as error:  # whatever an optimizer has to say of them
            raise FrameError(
                f"Expected hyper-parameters that {agreement.optimizer} takes, got {groups!s:.200} ({error}). Do: "
                "give the optimizer such."
            ) from error
        self._checked.append(_but_rates(groups))
        self._first_groups = first

    def put(self, tensor: int, body: np.ndarray) -> None:
        """Take a parameter's first values."""
        assert self.agreement is not None
        values = values_of(body, self.agreement.tensors[tensor].spec)
        self.parameters[tensor] = torch.nn.Parameter(values)
        self.views[tensor] = values.clone()

    def values(self, tensor: int) -> np.ndarray:
        """uint8: a parameter's values as the workers have them."""
        return body_of(self.views[tensor])

    def update(
        self, tensor: int, step: int, pushes: Mapping[int, Payload | None], groups: Groups, used: bool
    ) -> Payload | None:
        """Average the pushes of the workers counted, let the optimizer step, and encode the change.

        Args:
            tensor: id of the parameter.
            step: its step.
            pushes: by worker; None for a gradient of zero.
            groups: hyper-parameters.
            used: whether a worker has used the parameter: the optimizer leaves it alone otherwise.

        Returns:
            The change; None where the average is not finite, as finite gradients may have an infinite sum. Nothing has
            changed then.

        Raises:
            PayloadError: a push does not decode.
        """
        assert self.agreement is not None
        terms = self.agreement.tensors[tensor]
        parameter, view = self.parameters[tensor], self.views[tensor]
        before = None if terms.pull_feedback else parameter.detach().float().clone()
        if used:
            mean = self._mean(tensor, step, pushes)
            if not bool(torch.isfinite(mean).all()):
                return None
            parameter.grad = mean
            optimizer = self.optimizer(tensor, groups)
            optimizer.step()
            parameter.grad = None
        change = parameter.detach().float() - (view.float() if before is None else before)
        ctx = pull_context(self.agreement, tensor, step)
        payload = terms.pulls.encode(change, ctx)
        add_change(terms.pulls, payload, ctx, view)
        return payload

    def decodes(self, tensor: int, step: int, worker: int, payload: Payload) -> bool:
        """Whether a push decodes."""
        assert self.agreement is not None
        try:
            self.agreement.tensors[tensor].pushes.decode(payload, push_context(self.agreement, tensor, worker, step))
        except PayloadError:
            return False
        return True

    def _mean(self, tensor: int, step: int, pushes: Mapping[int, Payload | None]) -> torch.Tensor:
        assert self.agreement is not None
        terms = self.agreement.tensors[tensor]
        found = {worker: payload for worker, payload in sorted(pushes.items()) if payload is not None}
        total = torch.zeros(terms.shape)
        if found:
            ctxs = [push_context(self.agreement, tensor, worker, step) for worker in found]
            terms.pushes.decode_sum(list(found.values()), ctxs, total)
        return (total / len(pushes)).to(terms.spec.dtype)

    def optimizer(self, tensor: int, groups: Groups) -> torch.optim.Optimizer:
        assert self.agreement is not None
        wanted = _wanted(groups[self.agreement.tensors[tensor].group])
        if tensor not in self.optimizers:
            self.optimizers[tensor] = self.new_optimizer(tensor, wanted)
        self.optimizers[tensor].param_groups[0].update(wanted)
        return self.optimizers[tensor]

    def new_optimizer(self, tensor: int, wanted: Mapping[str, Any]) -> torch.optim.Optimizer:
        """An optimizer of one parameter, without a state yet."""
        assert self.agreement is not None
        return _new_optimizer(self.agreement.optimizer, self._allowed, self.parameters[tensor], wanted)


def _wanted(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyper-parameters, as optimizers take them."""
    if "params" in group:
        raise OptionError("Expected hyper-parameters, got parameters.")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


def _but_rates(groups: Groups) -> Groups:
    """The groups with one rate for all that are numbers, as schedules change it with every step."""
    rates = [group.get("lr") for group in groups]
    usual = [type(rate) is float and 0 <= rate < math.inf for rate in rates]
    return tuple({**group, "lr": 1.0} if plain else group for group, plain in zip(groups, usual))


def _new_optimizer(
    name: str, allowed: tuple[str, ...], parameter: torch.nn.Parameter, wanted: Mapping[str, Any]
) -> torch.optim.Optimizer:
    kind = optimizer_class(name, allowed)
    made: torch.optim.Optimizer = kind([{"params": [parameter], **wanted}])  # type: ignore[call-arg]
    return made
