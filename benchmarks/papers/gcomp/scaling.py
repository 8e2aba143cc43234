"""ResNet-50 and BERT with `lossless` and `gcomp` on up to 128 nodes, simulated: figures 15 to 17 of GCOMP's paper.

gradwire's own operations run in virtual time (`gradwire simulate`), with one rank per node and the costs of codecs,
tasks and frames on one core of this machine. Codecs are measured on gradients of the text workload after nine steps,
one of each rank from a batch of its own, `gcomp` with the optimizer state and the guard for each number of ranks; the
compression is therefore that of a young training. Payloads are as long as those that would travel: on a ring, sums of
1 to W − 1 gradients once each, and the whole sum W − 1 times; with scatter-reduce, a rank's own gradient and the mean,
equally often. Levels are derived. A step computes for 150 ms (there is no A100 as in the paper), two thirds of them in
the backward pass. Dense is gradwire's own ring without a codec.
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
from gradwire.core.context import Context
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.ddp.optimizer_state import OptimizerState
from gradwire.planner.costs import Costs
from gradwire.planner.curves import Curve
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


def recorded(ranks: int = RANKS[-1]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of a matrix at the tenth step, one of each rank, and its optimizer state."""
    torch.manual_seed(0)
    workload = make_workload("text")
    model = workload.model()
    optimizer = workload.optimizer(model)
    named = list(model.named_parameters())
    name, parameter = max(named, key=lambda each: each[1].numel())

    def gradient(number: int, rank: int, of: int) -> torch.Tensor:
        batch = workload.batch(0, number, rank, of)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        assert parameter.grad is not None
        return parameter.grad.reshape(-1).clone()

    for number in range(9):
        gradient(number, 0, 4)
        optimizer.step()
    grads = [gradient(9, rank, ranks) for rank in range(ranks)]
    aux = OptimizerState(optimizer, named)(name, ElementRange(0, parameter.numel()))
    return grads, {key: values.clone() for key, values in aux.items()}


def ratio_of(
    spec: str, strategy: str, ranks: int, grads: Sequence[torch.Tensor], aux: dict[str, torch.Tensor]
) -> float:
    """Bytes on the wire over those of float32, of the gradients of that many ranks."""
    codec, is_ring = make(spec), strategy == "ring"

    def packed(values: torch.Tensor, share: float | None) -> int:
        ctx = Context("w", world_size=ranks, spec=TensorSpec.of(values), aux=aux, error_share=share)
        return codec.encode(values, ctx).body.nbytes

    total, before = grads[0] / ranks, []
    for grad in grads[1:ranks]:
        if is_ring or not before:
            before.append(packed(total, None if is_ring else 0.5 / (ranks - 1)))
        total = total + grad / ranks
    last = packed(total, None if is_ring else 0.5)
    return (sum(before) / len(before) + last) / 2 / total.nbytes


def costs_of(
    ranks: int, strategy: str, known: Costs, grads: Sequence[torch.Tensor], aux: dict[str, torch.Tensor]
) -> tuple[Costs, dict[str, float]]:
    """This machine's costs, with the codecs of these gradients, and the ratio of each codec."""
    middle = torch.stack([*grads[: ranks // 2]]).sum(0) / ranks
    codecs, ratios = dict(known.codecs), {"none": 1.0, "fp16": 0.5}
    for spec in ("lossless", "gcomp"):
        of = aux if spec == "gcomp" else {}
        ratios[spec] = ratio = ratio_of(spec, strategy, ranks, grads, of)
        measured = measure_codec(make(spec), SIZES, 1.0, world_size=ranks, gradient=middle, aux=of)
        factor = ratio * 4 * SIZES[-1] / measured.payload_bytes(SIZES[-1])
        nbytes = Curve.through(SIZES, [factor * measured.payload_bytes(size) for size in SIZES])
        codecs[spec] = replace(measured, payload_bytes=nbytes)
    return replace(known, codecs=codecs), ratios


def run() -> Iterator[dict[str, Any]]:
    """Run all models, numbers of ranks, rates and methods."""
    known, (grads, aux) = machine_costs(["fp16"]), recorded()
    for ranks in RANKS:
        costs = {strategy: costs_of(ranks, strategy, known, grads, aux) for strategy in ("ring", "scatter_reduce")}
        for name in MODELS:
            model = SimulatedModel.of(models.get(name), COMPUTE)
            for rate in RATES:
                cluster = Cluster(ranks, SimulatedLink(rate, 20e-6))
                dense = 0.0
                for method, strategy in WAYS:
                    of_codecs, ratios = costs[strategy]
                    found = step(model, Plan(method, strategy=strategy), cluster, of_codecs, fold=True)
                    dense = dense or found.seconds
                    fixed = {"model": name, "ranks": ranks, "rate": f"{rate / 1e9:g}gbit", "method": method,
                             "strategy": strategy, "dtype": "float32", "source": "simulated"}  # fmt: skip
                    yield {**fixed, "metric": "step", "value": found.seconds, "unit": "s"}
                    yield {**fixed, "metric": "efficiency", "value": found.efficiency, "unit": "fraction"}
                    yield {**fixed, "metric": "speedup over dense", "value": dense / found.seconds, "unit": "ratio"}
                    yield {**fixed, "metric": "ratio", "value": ratios[method], "unit": "fraction"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Table of speed-ups over dense and of ratios."""
    return "\n".join(
        f"{row['model']:10}{row['rate']:8}{row['ranks']:>4} {row['method']:10}{row['strategy']:15}{row['metric']:20}"
        f"{row['value']:7.3f}"
        for row in rows
        if row["metric"] in ("speedup over dense", "ratio")
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
