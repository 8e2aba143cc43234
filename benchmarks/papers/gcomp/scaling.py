"""ResNet-50 and BERT with `lossless` and `gcomp` on up to 128 nodes, simulated: figures 15 to 17 of GCOMP's paper.

gradwire's own operations run in virtual time (`gradwire simulate`), with one rank per node and the costs of codecs,
tasks and frames on one core of this machine. Codecs are measured on a gradient of the text workload after nine steps,
`gcomp` with its optimizer state and the guard for each number of ranks; the compression is therefore that of a young
training. A step computes for 150 ms (there is no A100 as in the paper), two thirds of them in the backward pass. Dense
is gradwire's own ring without a codec.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.plotting import COLORS, DENSE, figure
from gradwire.bench.workloads import make_workload
from gradwire.compressors import make
from gradwire.core.spec import ElementRange
from gradwire.ddp.optimizer_state import OptimizerState
from gradwire.planner.costs import Costs
from gradwire.simulate import Cluster, Compute, SimulatedLink, SimulatedModel, models, step
from gradwire.simulate.machine import machine_costs
from gradwire.sync.plan import Plan
from gradwire.tuning.measure_codec import measure_codec

MODELS = ("resnet50", "bert-base")
RANKS = (4, 8, 16, 32, 64, 128)
RATES = (1e9, 10e9)
COMPUTE = Compute(0.05, 0.1)
WAYS = (("none", "ring"), ("fp16", "ring"), ("lossless", "ring"), ("lossless", "scatter_reduce"), ("gcomp", "ring"),
        ("gcomp", "scatter_reduce"))  # fmt: skip
SIZES = (1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22)


def recorded() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Gradient of a matrix at the tenth step, and its optimizer state."""
    torch.manual_seed(0)
    workload = make_workload("text")
    model = workload.model()
    optimizer = workload.optimizer(model)
    for number in range(10):
        batch = workload.batch(0, number, 0, 4)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        if number < 9:
            optimizer.step()
    named = list(model.named_parameters())
    name, parameter = max(named, key=lambda each: each[1].numel())
    aux = OptimizerState(optimizer, named)(name, ElementRange(0, parameter.numel()))
    assert parameter.grad is not None
    return parameter.grad.reshape(-1).clone(), {key: values.clone() for key, values in aux.items()}


def costs_of(ranks: int, known: Costs, grad: torch.Tensor, aux: dict[str, torch.Tensor]) -> Costs:
    """This machine's costs, with the codecs of that gradient for `ranks` ranks."""
    measured = {
        "lossless": measure_codec(make("lossless"), SIZES, 1.0, world_size=ranks, gradient=grad),
        "gcomp": measure_codec(make("gcomp"), SIZES, 1.0, world_size=ranks, gradient=grad, aux=aux),
    }
    return replace(known, codecs={**known.codecs, **measured})


def run() -> Iterator[dict[str, Any]]:
    """Run all models, numbers of ranks, rates and methods."""
    known, (grad, aux) = machine_costs(["fp16"]), recorded()
    for ranks in RANKS:
        costs = costs_of(ranks, known, grad, aux)
        packed = {spec: codec.payload_bytes(SIZES[-1]) / SIZES[-1] / 4 for spec, codec in costs.codecs.items()}
        for name in MODELS:
            model = SimulatedModel.of(models.get(name), COMPUTE)
            for rate in RATES:
                cluster = Cluster(ranks, SimulatedLink(rate, 20e-6))
                dense = 0.0
                for method, strategy in WAYS:
                    found = step(model, Plan(method, strategy=strategy), cluster, costs, fold=True)
                    dense = dense or found.seconds
                    fixed = {"model": name, "ranks": ranks, "rate": f"{rate / 1e9:g}gbit", "method": method,
                             "strategy": strategy, "dtype": "float32", "source": "simulated"}  # fmt: skip
                    yield {**fixed, "metric": "step", "value": found.seconds, "unit": "s"}
                    yield {**fixed, "metric": "efficiency", "value": found.efficiency, "unit": "fraction"}
                    yield {**fixed, "metric": "speedup over dense", "value": dense / found.seconds, "unit": "ratio"}
                    yield {**fixed, "metric": "ratio", "value": packed[method], "unit": "fraction"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Table of speed-ups over dense."""
    return "\n".join(
        f"{row['model']:10}{row['rate']:8}{row['ranks']:>4} {row['method']:10}{row['strategy']:15}{row['value']:7.2f}"
        for row in rows
        if row["metric"] == "speedup over dense"
    )


def plot(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Plot steps per second of all ranks together."""
    speeds: dict[tuple[str, ...], dict[int, float]] = {}
    for row in rows:
        if row["metric"] == "step":
            key = (row["model"], row["rate"], row["method"], row["strategy"])
            speeds.setdefault(key, {})[row["ranks"]] = row["ranks"] / row["value"]
    with figure(folder / "scaling.png", len(RATES), len(MODELS), (9, 7)) as axes:
        for line, rate in zip(axes, RATES, strict=True):
            for axis, model in zip(line, MODELS, strict=True):
                for color, way in zip((DENSE, *COLORS), WAYS, strict=False):
                    found = speeds.get((model, f"{rate / 1e9:g}gbit", *way), {})
                    axis.plot(list(found), list(found.values()), "o-", color=color, label=", ".join(way))
                axis.set_title(f"{model}, {rate / 1e9:g} Gb/s", fontsize=10)
                axis.set_xscale("log", base=2)
                axis.set_yscale("log")
            line[0].set_ylabel("batches/s of all ranks (logarithmic)")
        for axis in axes[-1]:
            axis.set_xlabel("ranks (logarithmic)")
        axes[0][0].legend(fontsize=8)
