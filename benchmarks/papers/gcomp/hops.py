"""Effect of encoding at every hop on an update of the parameters, from 2 to 128 ranks.

A ResNet-8 has trained for 60 steps on CIFAR-10. At the next step, each rank has a gradient of its own batch of 8
images. The gradients are averaged on a ring (each hop decodes, adds and encodes again, W encodes on the path of an
element) and with scatter-reduce (W − 1 encodes of gradients, one of the mean, which may make half of the error), and
the optimizer steps. Levels are derived. Bytes are those on the wire, where the last payload of an element travels W − 1
times, each other one once. The reference is the same in float64 without cuts. The error of a parameter is its distance
from the reference in units of 2^-23 of itself, the last bit of its mantissa: in float64 due to cuts alone, and in
float32 with all roundings. Exact sums have roundings, too.

Without the guard δ > W · 2ⁿ, each rank cuts as if it were alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.options import Cifar10
from benchmarks.papers.gcomp.models import OPTIMIZERS, resnet
from gradwire.compressors import make
from gradwire.core.context import Context
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.ddp.optimizer_state import OptimizerState

RANKS = (2, 4, 8, 16, 32, 64, 128)
STEPS, BATCH = 60, 8
CHOSEN = ("SGD", "AdamW")
Send = Callable[[int, torch.Tensor, bool], torch.Tensor]
"""Sends values of a parameter, given by its index; true if it is the last encode of the path."""


def updated(
    model: nn.Module, optimizer: torch.optim.Optimizer, grads: Sequence[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Parameters of a copy of the model after a step with these gradients, computed in this precision."""
    model, optimizer = copy.deepcopy((model, optimizer))
    model.to(dtype)
    for group in optimizer.param_groups:
        group["foreach"] = False
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad.to(dtype)
        for key, value in optimizer.state[parameter].items():
            if key != "step" and isinstance(value, torch.Tensor):
                optimizer.state[parameter][key] = value.to(dtype)
    optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


class State:
    """A model in training, and the gradients of many ranks at its next step."""

    def __init__(self, data: Path, optimizer: str) -> None:
        torch.manual_seed(0)
        self.training = resnet(data, BATCH)
        self.model = self.training.model()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        for step in range(STEPS):
            self._backward(step, 0)
            self.optimizer.step()
        self.grads = [self._backward(STEPS, rank) for rank in range(max(RANKS))]
        self.named = list(self.model.named_parameters())
        self.slices = OptimizerState(self.optimizer, self.named)
        self.codec = make("gcomp")
        self.nbytes = self.plain = 0

    def _backward(self, step: int, rank: int) -> list[torch.Tensor]:
        inputs, targets = self.training.batch(0, step, rank)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), targets).backward()
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]

    def sent(self, index: int, values: torch.Tensor, is_last: bool, path: str, ranks: int, guard: bool) -> torch.Tensor:
        """Encode and decode the gradient of one parameter."""
        aux = self.slices(self.named[index][0], ElementRange(0, values.numel()))
        share = (0.5 if is_last else 0.5 / (ranks - 1)) if path == "scatter_reduce" else 1 / ranks
        spec = TensorSpec((values.numel(),))
        ctx = Context("w", world_size=ranks, spec=spec, aux=aux, error_share=share if guard else 1.0)
        payload = self.codec.encode(values.reshape(-1), ctx)
        times = ranks - 1 if is_last else 1
        self.nbytes, self.plain = self.nbytes + times * payload.body.nbytes, self.plain + times * values.nbytes
        return self.codec.decode(payload, ctx).view(values.shape)

    def mean(self, path: str, ranks: int, send: Send) -> list[torch.Tensor]:
        """Mean of all ranks' gradients, as ranks receive it."""
        found = []
        for index in range(len(self.named)):
            first, *others = [self.grads[rank][index] * (1 / ranks) for rank in range(ranks)]
            if path == "ring":
                total = send(index, first, False)
                for number, grad in enumerate(others, start=2):
                    total = send(index, total + grad, number == ranks)
            else:
                total = first
                for grad in others:
                    total = total + send(index, grad, False)
                total = send(index, total, True)
            found.append(total)
        return found

    def updated(self, grads: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """All parameters after a step with these gradients, computed in this precision."""
        return torch.cat([each.reshape(-1) for each in updated(self.model, self.optimizer, grads, dtype)]).double()


def cut_alone(state: State, path: str, ranks: int, send: Send) -> list[torch.Tensor]:
    """The exact mean in float64 minus everything cut on the way."""
    lost = [torch.zeros(parameter.shape, dtype=torch.float64) for _, parameter in state.named]

    def counting(index: int, values: torch.Tensor, is_last: bool) -> torch.Tensor:
        arrived = send(index, values, is_last)
        lost[index] += arrived.double() - values.double()
        return arrived

    state.mean(path, ranks, counting)
    exact = state.mean(path, ranks, lambda _, values, __: values.double())
    return [mean + each for mean, each in zip(exact, lost, strict=True)]


def run(cifar10: Cifar10) -> Iterator[dict[str, Any]]:
    """Run all optimizers, numbers of ranks and paths."""
    for optimizer in CHOSEN:
        state = State(cifar10, optimizer)
        theta = torch.cat([parameter.detach().reshape(-1) for _, parameter in state.named]).double().abs()
        for ranks in RANKS:
            for path in ("ring", "scatter_reduce"):
                right = state.updated(state.mean(path, ranks, lambda _, values, __: values.double()), torch.float64)
                sends: dict[str, Send] = {
                    "exact": lambda _, values, __: values,
                    "gcomp": partial(state.sent, path=path, ranks=ranks, guard=True),
                    "without the guard": partial(state.sent, path=path, ranks=ranks, guard=False),
                }
                for method, send in sends.items():
                    state.nbytes = state.plain = 0
                    cut = state.updated(cut_alone(state, path, ranks, send), torch.float64)
                    ratio = state.nbytes / state.plain if state.plain else 1.0
                    both = state.updated(state.mean(path, ranks, send), torch.float32)
                    for metric, found in (("cut alone", cut), ("with roundings", both)):
                        off = (found - right).abs() / (torch.maximum(theta, right.abs()) * 2.0**-23)
                        off = off.nan_to_num(0.0)
                        fixed = {"optimizer": optimizer, "ranks": ranks, "strategy": path, "method": method,
                                 "dtype": "float32", "source": "measured"}  # fmt: skip
                        for name, value in (("largest", off.max()), ("mean", off.mean())):
                            figure = {"metric": f"off, {metric}, {name}", "value": float(value), "unit": "last bits"}
                            yield {**fixed, **figure}
                    yield {**fixed, "metric": "ratio", "value": ratio, "unit": "fraction"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each figure."""
    return "\n".join(
        f"{row['optimizer']:7}{row['ranks']:>4} {row['strategy']:15}{row['method']:18}{row['metric']:30}"
        f"{row['value']:9.3f}"
        for row in rows
    )
