"""Distance of losses with `gcomp` from those without compression: figures 18 and 19 of its paper.

Four ranks in one process train the models of `benchmarks.papers.gcomp.models` from scratch, with batches of 8 per rank,
with SGD, with and without momentum, and with AdamW, on three seeds. Gradients are averaged exactly; with `gcomp`, whose
levels are derived; with 18 of 23 bits cut from every mantissa regardless of the optimizer; or exactly, but only in
every eighth step. In the seven steps between, ranks use their own gradients, and in the eighth they also average their
parameters, since otherwise they would stay apart. Exact sums in two other orders of ranks, which change only roundings,
show how training amplifies any difference.

With scatter-reduce, every rank's gradient is encoded, except the owner's, and the mean once more. The figures compare
the training loss of all ranks at each step with that of exact sums at the same step. Each seed of a training is a part
of the record, so the command may be stopped and started again.

Source: GCOMP (SoCC 2024), section 7.6. Differences: small models for some hundred steps; the paper does not say what
ranks do between all-reduces.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

from benchmarks.keys import key_of
from benchmarks.options import Cifar10, Sst2, choose
from benchmarks.papers.gcomp.models import OPTIMIZERS, Training, trainings
from benchmarks.plotting import COLORS, DENSE, figure, legend_below
from gradwire.compressors import make
from gradwire.core.context import Context
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.ddp.optimizer_state import OptimizerState
from gradwire.kernels import active as kernels

RANKS, BATCH, SPARSE = 4, 8, 8
SEEDS = (0, 1, 2)
ORDERS = {"another order": (3, 2, 1, 0), "a third order": (1, 3, 0, 2)}
METHODS = ("exact", *ORDERS, "gcomp", "18 bits cut", "every 8 steps")
CHOSEN = ("SGD, momentum", "AdamW", "SGD")
KEY, CHOICES = ("workload", "optimizer", "seed"), ("optimizers", "seeds")
EVERY = 5  # steps between the losses that are recorded
Row = dict[str, Any]


class Job:
    """One training of all ranks, which share one replica while replicas are equal.

    Attributes:
        bytes_sent: Bytes of all payloads of gcomp.
        bytes_plain: Bytes of the same tensors in float32.
    """

    def __init__(
        self, training: Training, optimizer: str, method: str, seed: int, order: Sequence[int] = range(RANKS)
    ) -> None:
        torch.manual_seed(seed)
        self.training, self.method, self.seed, self.order = training, method, seed, order
        model = training.model()
        num_replicas = RANKS if method == "every 8 steps" else 1
        self.models = [model, *(copy.deepcopy(model) for _ in range(num_replicas - 1))]
        self.optimizers = [OPTIMIZERS[optimizer](each) for each in self.models]
        self.named = list(model.named_parameters())
        self.state = OptimizerState(self.optimizers[0], self.named)
        self.codec = make("gcomp")
        self.bytes_sent = self.bytes_plain = 0

    def step(self, number: int) -> float:
        """The mean loss of all ranks."""
        losses, grads = zip(*(self._backward(number, rank) for rank in range(RANKS)), strict=True)
        if self.method == "every 8 steps":
            self._step_sparsely(number, grads)
        else:
            for index, (name, parameter) in enumerate(self.named):
                parameter.grad = self._mean(name, [grad[index] for grad in grads])
            self.optimizers[0].step()
        return float(np.mean(losses))

    def _backward(self, number: int, rank: int) -> tuple[float, list[torch.Tensor]]:
        model, optimizer = self.models[rank % len(self.models)], self.optimizers[rank % len(self.models)]
        inputs, targets = self.training.batch(self.seed, number, rank)
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss.item(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def _mean(self, name: str, grads: list[torch.Tensor]) -> torch.Tensor:
        own, *others = (grads[rank] for rank in self.order)
        total = own / RANKS
        for grad in others:
            total = total + self._sent(name, grad, 1 / RANKS)
        return self._sent(name, total, 1.0)

    def _sent(self, name: str, grad: torch.Tensor, scale: float) -> torch.Tensor:
        """Encode and decode scale · grad."""
        if self.method == "18 bits cut":
            out = (grad * scale).reshape(-1)
            kernels.truncate_floats(out.numpy(), np.full(out.numel(), np.inf, np.float32), 1.0, out.numpy())
            return out.view(grad.shape)
        if self.method != "gcomp" or grad.dim() == 1:  # under a blanket method, vectors travel dense
            return grad * scale
        aux, share = self.aux(name, grad, scale), self.error_share(scale)
        ctx = Context(name, world_size=RANKS, spec=TensorSpec.of(grad), aux=aux, error_share=share)
        payload = self.codec.encode(grad, ctx, scale=scale)
        self.bytes_sent, self.bytes_plain = self.bytes_sent + payload.body.nbytes, self.bytes_plain + grad.nbytes
        return self.codec.decode(payload, ctx)

    def aux(self, name: str, grad: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
        """Optimizer state that the codec needs to send scale · grad."""
        return {**self.state(name, ElementRange(0, grad.numel())), "common": torch.tensor(True)}

    def error_share(self, scale: float) -> float | None:
        """Share of the error of an encode: half for the mean, whose scale is 1, and half for all others."""
        return 0.5 if scale == 1.0 else 0.5 / (RANKS - 1)

    def _step_sparsely(self, number: int, grads: tuple[list[torch.Tensor], ...]) -> None:
        average = number % SPARSE == SPARSE - 1
        means = [torch.stack(each).mean(0) for each in zip(*grads, strict=True)]
        for model, optimizer, own in zip(self.models, self.optimizers, grads, strict=True):
            for parameter, grad in zip(model.parameters(), means if average else own, strict=True):
                parameter.grad = grad.clone()
            optimizer.step()
        if average:
            with torch.no_grad():
                for each in zip(*(model.parameters() for model in self.models), strict=True):
                    mean = torch.stack([parameter.detach() for parameter in each]).mean(0)
                    for parameter in each:
                        parameter.copy_(mean)


def part(training: Training, optimizer: str, seed: int, steps: int) -> Iterator[Row]:
    """All figures of one seed: the loss of every fifth step, and distances from exact sums over all steps."""
    exact: list[float] = []
    for method in METHODS:
        job = Job(training, optimizer, method, seed, ORDERS.get(method, range(RANKS)))
        losses = [job.step(number) for number in range(steps)]
        exact = exact or losses
        fixed = {"workload": training.name, "optimizer": optimizer, "seed": seed, "method": method, "dtype": "float32",
                 "ranks": RANKS, "source": "measured"}  # fmt: skip
        for number in range(EVERY, steps + 1, EVERY):
            yield {**fixed, "step": number, "metric": "loss", "value": losses[number - 1], "unit": "nat"}
        if job.bytes_plain:
            yield {**fixed, "metric": "ratio", "value": job.bytes_sent / job.bytes_plain, "unit": "fraction"}
        if method != "exact":
            yield from ({**fixed, "samples": steps, **row} for row in distances(np.subtract(losses, exact)))


def distances(off: np.ndarray) -> Iterator[Row]:
    """Figures of losses minus those of exact sums."""
    size, late = np.abs(off), off[-(off.size // 4 or 1) :]
    low, high = (float(np.percentile(size, q)) for q in (20, 80))
    yield {"metric": "mean deviation", "value": float(size.mean()), "unit": "nat", "p20": low, "p80": high}
    yield {"metric": "variance of the deviation", "value": float(off.var()), "unit": "nat2"}
    yield {"metric": "difference, last quarter", "value": float(late.mean()), "unit": "nat"}


def run(
    cifar10: Cifar10,
    sst2: Sst2,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 200,
    optimizers: Annotated[str, typer.Option(help="Some of the optimizers, with semicolons in between.")] = "",
    seeds: Annotated[str, typer.Option(help="Some of the seeds.")] = "",
    done: Set[tuple[str, ...]] = frozenset(),
) -> Iterator[list[Row]]:
    """Train with each method, seed by seed."""
    both = trainings(cifar10, sst2, BATCH)
    for seed in choose(seeds, SEEDS):
        for optimizer in choose(optimizers, CHOSEN, ";"):
            for training in both:
                where = {"workload": training.name, "optimizer": optimizer, "seed": seed}
                if key_of(where, KEY) not in done:
                    yield list(part(training, optimizer, seed, steps))


def of_seeds(rows: Sequence[Row], metric: str) -> dict[tuple[str, str, str], list[float]]:
    """The values of a metric, seed by seed, by workload, optimizer and method."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["metric"] == metric:
            found.setdefault((row["workload"], row["optimizer"], row["method"]), []).append(row["value"])
    return found


def table(rows: Sequence[Row]) -> str:
    """Mean deviation of each method: mean of the seeds, with the smallest and the largest."""
    found = of_seeds(rows, "mean deviation")
    lines = [f"| | | {' | '.join(METHODS[1:])} |", "|---" * (len(METHODS) + 1) + "|"]
    for workload, optimizer in dict.fromkeys(key[:2] for key in found):
        cells = []
        for method in METHODS[1:]:
            values = found.get((workload, optimizer, method), [float("nan")])
            cells.append(f"{np.mean(values):.2g} ({min(values):.1g} to {max(values):.1g})")
        lines.append(f"| {workload}, {optimizer} | {len(values)} seeds | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Plot mean deviations of all seeds as dots (top), and the recorded losses of the first seed as curves (bottom)."""
    off = of_seeds(rows, "mean deviation")
    pairs = list(dict.fromkeys(key[:2] for key in off))
    with figure(folder / "losses.png", 2, len(pairs), (4.2 * len(pairs), 7)) as axes:
        for upper, lower, (workload, optimizer) in zip(*axes, pairs, strict=True):
            for number, (color, method) in enumerate(zip((DENSE, *COLORS), METHODS, strict=False)):
                values = off.get((workload, optimizer, method), [])
                upper.plot([number] * len(values), values, "o", color=color)
                curve = {
                    row["step"]: row["value"] for row in rows
                    if (row["workload"], row["optimizer"], row["method"], row["metric"], row.get("seed"))
                    == (workload, optimizer, method, "loss", SEEDS[0])
                }  # fmt: skip
                means = np.convolve(list(curve.values()), np.ones(2) / 2, "valid")
                lower.plot(list(curve)[1:], means, color=color, label=method, linewidth=1.2)
            upper.set_yscale("log")
            upper.set_xticks(range(len(METHODS)), [name.replace(" ", "\n", 1) for name in METHODS])
            upper.set_title(f"{workload}, {optimizer}", fontsize=10)
            lower.set_xlabel("step")
        axes[0][0].set_ylabel("mean distance from the loss of exact sums, nat")
        axes[1][0].set_ylabel("training loss, mean of 2 recorded steps, nat")
        legend_below(axes[1][0])
