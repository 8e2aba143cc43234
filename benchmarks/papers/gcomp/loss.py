"""Distance of losses with `gcomp` from those without compression: figures 18 and 19 of its paper.

Four ranks in one process train the models of `benchmarks.papers.gcomp.models` from scratch, with batches of 8 per rank,
with SGD and with AdamW, on three seeds. Gradients are averaged exactly; with `gcomp`; with 18 of 23 bits cut from every
mantissa regardless of the optimizer; or exactly, but only in every eighth step. In the seven steps between, ranks use
their own gradients, and in the eighth they also average their parameters, since otherwise they would stay apart. Exact
sums in another order of ranks, which changes only roundings, show how training amplifies any difference.

With scatter-reduce, every rank's gradient is encoded, except the owner's, and the mean once more. The figures compare
the training loss of all ranks at each step with that of exact sums at the same step.

Source: GCOMP (SoCC 2024), section 7.6. Differences: small models for some hundred steps; the paper does not say what
ranks do between all-reduces.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

from benchmarks.options import Cifar10, Sst2
from benchmarks.papers.gcomp.models import OPTIMIZERS, Training, trainings
from benchmarks.plotting import COLORS, DENSE, figure, legend_below
from gradwire.compressors import make
from gradwire.core.context import Context
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.ddp.optimizer_state import OptimizerState
from gradwire.kernels import active as kernels

RANKS, BATCH, SPARSE = 4, 8, 8
SEEDS = (0, 1, 2)
METHODS = ("exact", "another order", "gcomp", "18 bits cut", "every 8 steps")
CHOSEN = ("SGD", "AdamW")
EVERY = 5  # steps between the losses that are recorded
Row = dict[str, Any]


class Job:
    """One training of all ranks, which share one replica while replicas are equal.

    Attributes:
        bytes_sent: Bytes of all payloads of gcomp.
        bytes_plain: Bytes of the same tensors in float32.
    """

    def __init__(self, training: Training, optimizer: str, method: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.training, self.method, self.seed = training, method, seed
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
        own, *others = grads[::-1] if self.method == "another order" else grads
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
        ctx = Context(name, world_size=RANKS, spec=TensorSpec.of(grad), aux=self.aux(name, grad, scale))
        payload = self.codec.encode(grad, ctx, scale=scale)
        self.bytes_sent, self.bytes_plain = self.bytes_sent + payload.body.nbytes, self.bytes_plain + grad.nbytes
        return self.codec.decode(payload, ctx)

    def aux(self, name: str, grad: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
        """Optimizer state that the codec needs to send scale · grad."""
        return self.state(name, ElementRange(0, grad.numel()))

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


def losses_of(training: Training, steps: int) -> Iterator[Row]:
    """The loss of every step of every method."""
    for optimizer in CHOSEN:
        for seed in SEEDS:
            for method in METHODS:
                job = Job(training, optimizer, method, seed)
                fixed = {"workload": training.name, "optimizer": optimizer, "seed": seed, "method": method}
                for number in range(steps):
                    yield {**fixed, "step": number + 1, "metric": "loss", "value": job.step(number), "unit": "nat"}


Key = tuple[str, str, str]


def deviations(found: Sequence[Row]) -> dict[Key, np.ndarray]:
    """Loss minus the loss with exact sums, for all steps and seeds, by workload, optimizer and method."""
    curves: dict[tuple[str, str, str, int], list[float]] = {}
    for row in found:
        if row["metric"] != "loss":
            continue
        curves.setdefault((row["workload"], row["optimizer"], row["method"], row["seed"]), []).append(row["value"])
    grouped: dict[Key, list[float]] = {}
    for (workload, optimizer, method, seed), losses in curves.items():
        if method != "exact":
            off = np.subtract(losses, curves[workload, optimizer, "exact", seed])
            grouped.setdefault((workload, optimizer, method), []).extend(off.tolist())
    return {key: np.array(values) for key, values in grouped.items()}


def summary(found: Sequence[Row]) -> Iterator[Row]:
    """Mean and spread of the deviations, over all steps and over the last quarter."""
    for (workload, optimizer, method), off in deviations(found).items():
        size = np.abs(off)
        fixed = {"workload": workload, "optimizer": optimizer, "method": method, "unit": "nat", "samples": size.size}
        low, high = (float(np.percentile(size, q)) for q in (20, 80))
        yield {**fixed, "metric": "mean deviation", "value": float(size.mean()), "p20": low, "p80": high}
        yield {**fixed, "metric": "variance of the deviation", "value": float(off.var())}


def run(
    cifar10: Cifar10, sst2: Sst2, steps: Annotated[int, typer.Option(help="Training steps.")] = 200
) -> Iterator[Row]:
    """Measure deviations, and record the loss of every fifth step."""
    found = [row for training in trainings(cifar10, sst2, BATCH) for row in losses_of(training, steps)]
    for row in (*summary(found), *(row for row in found if row["step"] % EVERY == 0)):
        yield {"dtype": "float32", "ranks": RANKS, "source": "measured", **row}


def table(rows: Sequence[Row]) -> str:
    """Table of the deviations of each method."""
    return "\n".join(
        f"{row['workload']:12}{row['optimizer']:8}{row['method']:16}{row['metric']:28}{row['value']:12.3e}"
        for row in rows
        if row["metric"] != "loss"
    )


def plot(rows: Sequence[Row], folder: Path) -> None:
    """Plot deviations as boxes (top), and the recorded losses of the first seed as curves (bottom)."""
    off = deviations(rows)
    pairs, methods = (list(dict.fromkeys(part)) for part in ([key[:2] for key in off], [key[2] for key in off]))
    with figure(folder / "losses.png", 2, len(pairs), (4.2 * len(pairs), 7)) as axes:
        for upper, lower, (workload, optimizer) in zip(*axes, pairs, strict=True):
            boxes = [off[workload, optimizer, method] for method in methods]
            names = [name.replace(" ", "\n", 1) for name in methods]
            upper.boxplot(boxes, whis=(1, 99), showfliers=False, tick_labels=names)
            upper.set_yscale("symlog", linthresh=1e-4)
            upper.set_title(f"{workload}, {optimizer}", fontsize=10)
            for color, method in zip((DENSE, *COLORS), METHODS, strict=False):
                curve = {
                    row["step"]: row["value"] for row in rows
                    if (row["workload"], row["optimizer"], row["method"], row["metric"], row.get("seed"))
                    == (workload, optimizer, method, "loss", SEEDS[0])
                }  # fmt: skip
                means = np.convolve(list(curve.values()), np.ones(2) / 2, "valid")
                lower.plot(list(curve)[1:], means, color=color, label=method, linewidth=1.2)
            lower.set_xlabel("step")
        axes[0][0].set_ylabel("loss minus that of exact sums, nat")
        axes[1][0].set_ylabel("training loss, mean of 2 recorded steps, nat")
        legend_below(axes[1][0])
