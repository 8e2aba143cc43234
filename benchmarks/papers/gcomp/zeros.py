"""What `lossless` and `gcomp` make of zeros: figure 3b of GCOMP's paper, and why its rates are lower than ours.

The paper's gradients are zeros for up to a half; a ResNet with batch normalization has none. Two kinds of layers do:
embeddings, where words that are not in the batch have no gradient, and layers next to ReLUs without normalization,
where units that are off for a whole batch have none. With usual initial weights, the inputs of deep layers resemble
each other, so about half of their units are off for all samples.

One rank trains, with batches of 8 and of 32 samples, with SGD with momentum: the ResNet-8 and the transformer
encoder of `benchmarks.papers.gcomp.models`, and a network like VGG without normalization (four convolutions, three
linear layers of width 512) on CIFAR-10. At some steps, gradients with more than one dimension are encoded as that rank
would send them on a ring, with levels derived and sent. Tables are those of the first steps. For comparison, normal
random numbers with and without zeros for half of them, at a thousandth of the parameters' size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.data import cifar
from benchmarks.options import Cifar10, Sst2
from benchmarks.papers.gcomp.models import OPTIMIZERS, Batch, Training, resnet, transformer
from gradwire.compressors import make
from gradwire.core.context import Context
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.ddp.optimizer_state import OptimizerState

RANKS, OPTIMIZER = 4, "SGD, momentum"
BATCHES = (8, 32)
STEPS = (2, 10, 50, 100, 200)
METHODS = {"lossless": "lossless", "levels sent": "gcomp:levels=sent", "levels derived": "gcomp"}
SIZE = 1 << 20
Row = dict[str, Any]
Recorded = list[tuple[str, torch.Tensor, dict[str, torch.Tensor]]]


def vgg() -> nn.Module:
    """Convolutions and linear layers with ReLUs, without normalization."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (32, 64, 128, 128):
        layers += [nn.Conv2d(inputs, outputs, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)]
        inputs = outputs
    layers += [nn.Flatten(), nn.Linear(128 * 4, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def rectified(data: Path, batch_size: int) -> Training:
    """The network without normalization, on the batches of the ResNet."""
    split = cifar.load(data, "train")

    def batch(seed: int, step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed((seed * 100_003 + step) * 1009 + rank)
        index = torch.randint(0, len(split[1]), (batch_size,), generator=generator)
        return cifar.batch(split, index, generator=generator)

    return Training("VGG without normalization", vgg, batch)


def recorded(training: Training, steps: Sequence[int]) -> Iterator[tuple[int, float, Recorded]]:
    """Step, counted from 1, mean loss of the last ten, and gradients with optimizer state of one rank, which trains."""
    torch.manual_seed(0)
    model = training.model()
    optimizer = OPTIMIZERS[OPTIMIZER](model)
    matrices = [(name, parameter) for name, parameter in model.named_parameters() if parameter.dim() > 1]
    state = OptimizerState(optimizer, matrices)
    losses: list[float] = []
    for step in range(1, max(steps) + 1):
        inputs, targets = training.batch(0, step, 0)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        if step in steps:
            found: Recorded = []
            for name, parameter in matrices:
                assert parameter.grad is not None
                found.append((name, parameter.grad.clone(), state.slices(name, ElementRange(0, parameter.numel()))))
            yield step, float(np.mean(losses[-10:])), found
        state.before_step([])
        optimizer.step()


def made_up(share_of_zeros: float) -> Recorded:
    """Normal random numbers, some of them zeros."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(SIZE, generator=generator))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    grad = 1e-3 * torch.randn(SIZE, generator=generator)
    grad[torch.rand(SIZE, generator=generator) < share_of_zeros] = 0
    return [("w", grad, OptimizerState(optimizer, [("w", parameter)]).slices("w", ElementRange(0, SIZE)))]


def figures(found: Recorded) -> Iterator[Row]:
    """Share of zeros, and bytes over those of float32."""
    plain = sum(grad.nbytes for _, grad, _ in found)
    zeros = sum(int((grad == 0).sum()) for _, grad, _ in found)
    yield {"metric": "zeros", "method": "none", "value": 4 * zeros / plain}
    tables: dict[str, Any] = {}
    for name, grad, _ in found:  # what two steps with this gradient would leave
        codec = make("lossless:refresh=1")
        for step in (1, 2):
            ctx = Context(name, step=step, spec=TensorSpec.of(grad), state=tables.get(name))
            state = codec.next_state(grad.reshape(-1).numpy(), ctx)  # type: ignore[attr-defined]
            if state is not None:
                tables[name] = state
    for method, spec in METHODS.items():
        packed = 0
        for name, grad, aux in found:
            given = {} if method == "lossless" else aux
            ctx = Context(name, world_size=RANKS, spec=TensorSpec.of(grad), aux=given, state=tables.get(name))
            packed += make(spec).encode(grad, ctx, scale=1 / RANKS).body.nbytes
        yield {"metric": "ratio", "method": method, "value": packed / plain}


def run(cifar10: Cifar10, sst2: Sst2) -> Iterator[Row]:
    """Run all trainings."""
    fixed = {"dtype": "float32", "ranks": RANKS, "source": "measured", "unit": "fraction"}
    for share in (0.0, 0.5):
        for row in figures(made_up(share)):
            yield {**fixed, "workload": f"random, {share:.0%} zeros", "batch": 0, "step": 1, **row}
    for batch in BATCHES:
        for training in (resnet(cifar10, batch), rectified(cifar10, batch), transformer(sst2, batch)):
            for step, loss, found in recorded(training, STEPS):
                here = {**fixed, "workload": training.name, "batch": batch, "step": step}
                yield {**here, "metric": "loss", "method": "loss", "value": loss, "unit": "nat"}
                yield from ({**here, **row} for row in figures(found))


def table(rows: Sequence[Row]) -> str:
    """Markdown table with one line for each training and step."""
    values = {(row["workload"], row["batch"], row["step"], row["method"]): row["value"] for row in rows}
    lines = [f"| | batch | step | loss | zeros | {' | '.join(METHODS)} |", "|---" * (len(METHODS) + 5) + "|"]
    for workload, batch, step in dict.fromkeys(key[:3] for key in values):
        cells = " | ".join(
            f"{values.get((workload, batch, step, method), 0.0):.3f}" for method in ("loss", "none", *METHODS)
        )
        lines.append(f"| {workload} | {int(batch)} | {int(step)} | {cells} |")
    return "\n".join(lines)
