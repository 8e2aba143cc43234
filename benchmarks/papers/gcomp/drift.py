"""How far trainings with gcomp drift from those with exact sums, by optimizer: what the moments remember of a cut.

    python -m benchmarks.papers.gcomp.drift           # a table
    python -m benchmarks.papers.gcomp.drift --csv     # and benchmarks/results/gcomp-drift.csv

Four ranks in one process train the digits model. Their gradients are summed exactly as `none` would by scatter-reduce;
the same with every encode cut by gcomp; and exactly again, but in another order of ranks, which changes nothing but
roundings. The difference is that of the parameters, relative to each, after so many steps: the median and the 99th of
a hundred, and the difference of the validation loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradwire.bench.records import write_figures
from gradwire.bench.workload import evaluate
from gradwire.bench.workloads import make_workload
from gradwire.compressors import make
from gradwire.core.context import Context
from gradwire.core.spec import Range, TensorSpec
from gradwire.integrations.optimizer_state import OptimizerState

RESULTS = Path("benchmarks/results/gcomp-drift.csv")
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
    """One training; `order` is that in which ranks are added, `cut` whether gcomp encodes."""

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
        aux = self.state(name, Range(0, grad.numel()))
        ctx = Context(name, world_size=RANKS, spec=TensorSpec.of(grad), aux=aux)
        payload = self.codec.encode_compensated(grad, ctx, None, scale=scale)
        self.bytes, self.plain = self.bytes + payload.body.nbytes, self.plain + grad.nbytes
        return self.codec.decode(payload, ctx)

    def parameters(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for _, parameter in self.named])

    def loss(self) -> float:
        samples = self.workload.validation()
        return evaluate(self.model, samples)[0] / len(samples.targets)


def run(steps: Sequence[int] = STEPS) -> Iterator[dict[str, Any]]:
    """A line an optimizer and a number of steps."""
    for optimizer in OPTIMIZERS:
        order = range(RANKS)
        exact, cut, turned = (
            Copy(optimizer, order, False),
            Copy(optimizer, order, True),
            Copy(optimizer, order[::-1], False),
        )
        for number in range(max(steps)):
            for each in (exact, cut, turned):
                each.step(number)
            if number + 1 in steps:
                theta, loss = exact.parameters(), exact.loss()
                for name, other in (("gcomp", cut), ("another order", turned)):
                    off = ((other.parameters() - theta).abs() / theta.abs()).nan_to_num(0)
                    yield {
                        "optimizer": optimizer, "step": number + 1, "method": name,
                        "median": float(off.median()), "p99": float(off.quantile(0.99)),
                        "loss_difference": other.loss() / loss - 1,
                        "ratio": cut.bytes / cut.plain if name == "gcomp" else None,
                    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="How far trainings with gcomp drift from exact ones.")
    parser.add_argument("--csv", action="store_true", help=f"write {RESULTS}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = list(run())
    print(f"{'optimizer':15}{'steps':>6}  {'':15}{'median':>10}{'p99':>10}{'loss':>11}{'bytes':>8}")
    for row in found:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:8.3f}"
        print(
            f"{row['optimizer']:15}{row['step']:>6}  {row['method']:15}{row['median']:10.1e}{row['p99']:10.1e}"
            f"{row['loss_difference']:+11.1e}{ratio}"
        )
    if args.csv:
        figures = (
            {**{key: row[key] for key in ("optimizer", "step", "method")}, "dtype": "float32", "ranks": RANKS,
             "source": "measured", "metric": metric, "value": row[metric], "unit": "fraction"}
            for row in found for metric in ("median", "p99", "loss_difference", "ratio") if row[metric] is not None
        )  # fmt: skip
        write_figures("gcomp-drift", figures, RESULTS, more_columns=("step", "optimizer"))
        print(f"Figures: {RESULTS.resolve()}")


if __name__ == "__main__":
    main()
