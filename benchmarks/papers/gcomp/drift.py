"""Drift of trainings with gcomp from those with exact sums, by optimizer: how moments keep errors.

Four ranks in one process train the digits model. Their gradients are summed exactly, as `none` would with
scatter-reduce; with every encode cut by gcomp; and exactly but in another order of ranks, which changes only roundings.
Figures are relative differences of parameters after some numbers of steps, median and 99th percentile, and the
difference of the validation loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gradwire.bench.workload import evaluate
from gradwire.bench.workloads import make_workload
from gradwire.compressors import make
from gradwire.core.context import Context
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.ddp.optimizer_state import OptimizerState

Row = dict[str, Any]
RANKS = 4
STEPS = (1, 10, 100, 300)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


class Copy:
    """One training. `order` is the order in which ranks are added, `cut` whether gcomp encodes."""

    def __init__(self, optimizer: str, order: Sequence[int], cut: bool) -> None:
        torch.manual_seed(0)
        self.workload = make_workload("digits")
        self.model = self.workload.model()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.named = list(self.model.named_parameters())
        self.state = OptimizerState(self.optimizer, self.named)
        self.order, self.cut, self.codec = order, cut, make("gcomp")
        self.bytes = self.plain = 0

    def step(self, number: int) -> None:
        each = [self._gradients(number, rank) for rank in range(RANKS)]
        for index, (name, parameter) in enumerate(self.named):
            own, *others = (each[rank][index] for rank in self.order)
            total = own * (1 / RANKS)
            for grad in others:
                total = total + self._sent(name, grad, 1 / RANKS)
            parameter.grad = self._sent(name, total, 1.0)
        self.optimizer.step()

    def _gradients(self, number: int, rank: int) -> list[torch.Tensor]:
        batch = self.workload.batch(0, number, rank, RANKS)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(batch.inputs), batch.targets).backward()
        return [parameter.grad.clone() for _, parameter in self.named]

    def _sent(self, name: str, grad: torch.Tensor, scale: float) -> torch.Tensor:
        if not self.cut:
            return grad * scale
        aux = self.state(name, ElementRange(0, grad.numel()))
        ctx = Context(name, world_size=RANKS, spec=TensorSpec.of(grad), aux=aux)
        payload = self.codec.encode(grad, ctx, scale=scale)
        self.bytes, self.plain = self.bytes + payload.body.nbytes, self.plain + grad.nbytes
        return self.codec.decode(payload, ctx)

    def parameters(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for _, parameter in self.named])

    def loss(self) -> float:
        samples = self.workload.validation()
        return evaluate(self.model, samples)[0] / len(samples.targets)


def run() -> Iterator[Row]:
    """Run all optimizers."""
    for optimizer in OPTIMIZERS:
        order = range(RANKS)
        exact, cut, turned = (
            Copy(optimizer, order, False),
            Copy(optimizer, order, True),
            Copy(optimizer, order[::-1], False),
        )
        for number in range(max(STEPS)):
            for each in (exact, cut, turned):
                each.step(number)
            if number + 1 in STEPS:
                theta, loss = exact.parameters(), exact.loss()
                for name, other in (("gcomp", cut), ("another order", turned)):
                    off = ((other.parameters() - theta).abs() / theta.abs()).nan_to_num(0)
                    values = {
                        "median": float(off.median()), "p99": float(off.quantile(0.99)),
                        "loss_difference": other.loss() / loss - 1,
                    }  # fmt: skip
                    if name == "gcomp":
                        values["ratio"] = cut.bytes / cut.plain
                    fixed = {"optimizer": optimizer, "step": number + 1, "method": name, "dtype": "float32",
                             "ranks": RANKS, "source": "measured", "unit": "fraction"}  # fmt: skip
                    yield from ({**fixed, "metric": metric, "value": value} for metric, value in values.items())


def table(rows: Sequence[Row]) -> str:
    """One line for each optimizer, number of steps and method."""
    lines = [f"{'optimizer':15}{'steps':>6}  {'':15}{'median':>10}{'p99':>10}{'loss':>11}{'bytes':>8}"]
    values: dict[tuple[str, int, str], dict[str, float]] = {}
    for row in rows:
        values.setdefault((row["optimizer"], row["step"], row["method"]), {})[row["metric"]] = row["value"]
    for (optimizer, step, method), found in values.items():
        ratio = f"{found['ratio']:8.3f}" if "ratio" in found else ""
        lines.append(
            f"{optimizer:15}{step:>6}  {method:15}{found['median']:10.1e}{found['p99']:10.1e}"
            f"{found['loss_difference']:+11.1e}{ratio}"
        )
    return "\n".join(lines)
