"""The parameters of one server, their optimizers, and the workers' copies of them.

The server keeps the values that workers have next to the exact parameters. Their difference is the error that updates
have left so far. A worker that returns gets these values.

Source: 3LC (Lim, Andersen, Kaminsky 2019), section 3: a change is compressed once for all pulls. Differences: the
paper keeps an error buffer. Here it follows from parameter and copy, so that it cannot drift. Without feedback, only
the change of the step is sent, as in the paper. The unit of compression is a chunk: a parameter above 32,768 elements
(`TransferOptions.chunk_elements`) is cut by rows, and each chunk has its own encode, scale (3LC's M) and step. In
the paper, this unit is a tensor. Vectors are joined to one chunk. What is called a parameter here is such a chunk.
"""

# Shapes: N = elements of a parameter.

from __future__ import annotations

import copy
import importlib
import json
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gradwire.core import host
from gradwire.core.errors import FrameError, OptionError, PayloadError
from gradwire.core.spec import TensorSpec, as_array
from gradwire.kernels import active as kernels
from gradwire.parameter_server.session import Groups, ParameterConfig, TrainingConfig
from gradwire.parameter_server.slot import body_of, values_of
from gradwire.parameter_server.update import add_change, pull_context, push_context
from gradwire.wire.payload import Payload

CHECKED_GROUPS = 16
"""Number of hyperparameters that are remembered as valid. All workers send the same, one after another."""
_WHOLE_MODEL = ("LBFGS", "SparseAdam")


def optimizer_class(name: str, allowed: tuple[str, ...] = ()) -> type[torch.optim.Optimizer]:
    """The optimizer class that a worker names.

    Args:
        name: Name of a class in `torch.optim`, or import path of another class.
        allowed: Import paths that may be loaded, from whoever starts the server.

    Raises:
        OptionError: The class does not exist, is not allowed, or needs the whole model in one step.
    """
    if name in allowed:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute, None)
    else:
        found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)) or name in _WHOLE_MODEL:
        raise OptionError(
            f"Parameter servers cannot use the optimizer {name!r}. Use one of torch.optim that steps each parameter by "
            "itself, or start the servers with --optimizer and the import path of yours."
        )
    return found


class ParameterShard:
    """Parameters and optimizers of one server. Use it from one thread at a time.

    Args:
        allowed: Import paths of optimizers beyond `torch.optim`.

    Attributes:
        config: Configuration of the training. The state machine sets it when the first worker joins.
        parameters: Parameters by tensor id.
        replicas: Values of the parameters at the workers, by tensor id.
        optimizers: One optimizer per parameter, so that each can step by itself.
    """

    def __init__(self, allowed: tuple[str, ...] = ()) -> None:
        self.config: TrainingConfig
        self.parameters: dict[int, torch.nn.Parameter] = {}
        self.replicas: dict[int, torch.Tensor] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self._allowed = allowed
        self._first_groups: Groups | None = None
        self._checked: deque[tuple[str, frozenset[tuple[int, int, str]], Groups]] = deque(maxlen=CHECKED_GROUPS)

    def check(self, config: TrainingConfig, groups: Groups) -> None:
        """Refuse hyperparameters with which a step would fail. Tries them on parameters of one element.

        Some hyperparameters cannot be changed later: the trial starts with the first ones and goes on with these.

        Raises:
            FrameError: The optimizer refuses them, or there is no such optimizer, or it keeps what cannot be saved.
        """
        checked = config.optimizer, config.kinds, _without_rates(groups)
        if checked in self._checked:
            return
        first = groups if self._first_groups is None or not self.optimizers else self._first_groups
        try:
            for number, dimensions, dtype in config.kinds:
                spec = TensorSpec((1,) * dimensions, getattr(torch, dtype))
                parameter = torch.nn.Parameter(host.ones(spec.shape, spec.dtype))
                optimizer = self._new_optimizer(config.optimizer, parameter, _plain_group(first[number]))
                for group in map(_plain_group, (first[number], groups[number], groups[number])):
                    optimizer.param_groups[0].update(group)
                    parameter.grad = torch.ones_like(parameter)
                    optimizer.step()
                    _expect_saved(optimizer, group)
                if not bool(torch.isfinite(parameter).all()):
                    raise ValueError("a step with them is not finite")
        except Exception as error:  # optimizers raise what they like
            raise FrameError(
                f"The optimizer {config.optimizer} does not take the hyperparameters {groups!s:.200} ({error}). Change "
                "them in the worker's optimizer."
            ) from error
        self._checked.append(checked)
        self._first_groups = first

    def put(self, tensor: int, body: np.ndarray) -> None:
        """Set the initial values of a parameter from the body of a frame."""
        values = values_of(body, self.config.tensors[tensor].spec)
        self.parameters[tensor] = torch.nn.Parameter(values)
        self.replicas[tensor] = values.clone()

    def values(self, tensor: int) -> np.ndarray:
        """The workers' values of a parameter, as the body of a frame (uint8)."""
        return body_of(self.replicas[tensor])

    def update(
        self, tensor: int, step: int, pushes: Mapping[int, Payload | None], groups: Groups, used: bool
    ) -> Payload | None:
        """Average the pushes, step the optimizer, and encode the change.

        Args:
            tensor: Id of the parameter.
            step: Step that is closed.
            pushes: Encoded gradients by worker; None for a gradient of zero.
            groups: Hyperparameters.
            used: Whether any worker has used the parameter. Otherwise the optimizer leaves it as it is.

        Returns:
            The encoded change. None if the average is not finite, which may happen although each gradient is, or what
            the step makes of it: nothing has changed then.

        Raises:
            PayloadError: A push does not decode. Nothing has changed.
        """
        config = self.config.tensors[tensor]
        parameter, replica = self.parameters[tensor], self.replicas[tensor]
        before = None if config.pull_feedback else parameter.detach().float().clone()
        saved = None
        if used:
            mean = self._mean(tensor, step, pushes)
            largest = float(kernels.abs_max(as_array(mean)))  # NaN if it is not finite
            if math.isnan(largest):
                return None
            optimizer = self.optimizer(tensor, groups)
            if largest > _safe_magnitude(config):
                saved = parameter.detach().clone(), copy.deepcopy(optimizer.state_dict())
            parameter.grad = mean
            optimizer.step()
            parameter.grad = None
        change = parameter.detach().float() - (replica.float() if before is None else before)
        ctx = pull_context(self.config, tensor, step)
        payload = config.pull_compressor.encode(change, ctx)
        if saved is not None and (payload.nonfinite or not _is_finite(optimizer)):
            with torch.no_grad():
                parameter.copy_(saved[0])
            optimizer.load_state_dict(saved[1])
            return None
        add_change(config.pull_compressor, payload, ctx, replica)
        return payload

    def decodes(self, tensor: int, step: int, worker: int, payload: Payload) -> bool:
        """Whether a push decodes."""
        try:
            self.config.tensors[tensor].push_compressor.decode(payload, push_context(self.config, tensor, worker, step))
        except PayloadError:
            return False
        return True

    def optimizer(self, tensor: int, groups: Groups) -> torch.optim.Optimizer:
        """The optimizer of a parameter, with these hyperparameters."""
        group = _plain_group(groups[self.config.tensors[tensor].group])
        if tensor not in self.optimizers:
            self.optimizers[tensor] = self._new_optimizer(self.config.optimizer, self.parameters[tensor], group)
        self.optimizers[tensor].param_groups[0].update(group)
        return self.optimizers[tensor]

    def _mean(self, tensor: int, step: int, pushes: Mapping[int, Payload | None]) -> torch.Tensor:
        config = self.config.tensors[tensor]
        payloads = {worker: payload for worker, payload in sorted(pushes.items()) if payload is not None}
        total = host.zeros(config.shape)
        if payloads:
            contexts = [push_context(self.config, tensor, worker, step) for worker in payloads]
            config.push_compressor.decode_sum(list(payloads.values()), contexts, total)
        return (total / len(pushes)).to(config.spec.dtype)

    def _new_optimizer(
        self, name: str, parameter: torch.nn.Parameter, group: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        kind = optimizer_class(name, self._allowed)
        made: torch.optim.Optimizer = kind([{"params": [parameter], **group}])  # type: ignore[call-arg]
        return made


def _safe_magnitude(config: ParameterConfig) -> float:
    """Magnitude of gradients up to which steps are taken to be finite: optimizers square gradients, and add them."""
    dtypes = [torch.float32, config.spec.dtype]
    if config.pull_compressor.name == "fp16":
        dtypes.append(torch.float16)
    return math.sqrt(min(torch.finfo(dtype).max for dtype in dtypes))


def _is_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether parameters and state are finite."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return all(bool(torch.isfinite(each).all()) for each in [*parameters, *states])


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters of a group in the form that optimizers take."""
    if "params" in group:
        raise OptionError("A worker sent parameters as a hyperparameter.")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


def _expect_saved(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Check after a step that checkpoints can hold the optimizer's state, and that it keeps none in its group.

    Raises:
        ValueError: It keeps something in its group, which a worker sets before each step, or something that is neither
            a tensor nor plain data.
    """
    now = optimizer.param_groups[0]
    changed = [key for key, value in group.items() if now[key] != value]
    if changed:
        raise ValueError(f"it changes {changed[0]!r} of its group in a step, and workers set it back")
    for state in optimizer.state.values():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) and json.loads(json.dumps(value)) != value:
                raise ValueError(f"its state {key!r} is neither a tensor nor plain data")


def _without_rates(groups: Groups) -> Groups:
    """The groups with one valid learning rate for all others, since schedules change it with every step."""
    rates = [group.get("lr") for group in groups]
    valid = [type(rate) is float and 0 <= rate < math.inf for rate in rates]
    return tuple({**group, "lr": 1.0} if usual else group for group, usual in zip(groups, valid))
