"""Scaling of HiPress's models from 16 to 4,096 nodes, simulated, compared with the paper's measurements on 16.

A rank is a node whose GPUs have already added up their gradients (HiPress, section 5). The costs of codecs are those of
the device code on an assumed GPU, and those of tasks and frames are measured on this machine
(`benchmarks.planning.described`). The baseline is a dense ring like that of collective libraries,
with buckets of 25 MB and no cost except the wire, its latency, and additions at the speed of memory.

The paper does not print step times. The computation of a model is therefore chosen so that this ring on 16 nodes is as
efficient as the paper's: 0.47 for the Transformer as printed; for the others as implied by HiPress's 0.95 (0.90 on the
local cluster, as printed) and its gain over Ring. The simulated ring uses its link perfectly and the paper's did not,
so the computation comes out too short, and codecs weigh too much.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any

import typer

from benchmarks.options import choose
from benchmarks.planning.described import MEMORY_BYTES_A_SECOND, gpu_costs, link
from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import FREE, LinearCost
from gradwire.simulate import Cluster, Compute, SimulatedGradient, SimulatedModel, StepResult, models, step
from gradwire.simulate.machine import machine_costs
from gradwire.sync.plan import Plan

RATES, NODES = (10e9, 25e9, 56e9, 100e9), (16, 64, 256, 1024, 4096)
BUCKET_BYTES = 25e6
Row = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """Measurements of the paper for a model on 16 nodes.

    Attributes:
        method, strategy: Method and strategy in HiPress's figure.
        ring_efficiency: Efficiency of the dense ring.
        gain: Speed-up of HiPress over the dense ring.
        rate_bits: Rate of the links.
    """

    method: str
    strategy: str
    ring_efficiency: float
    gain: float
    rate_bits: float = 100e9


CLAIMS = {
    "vgg19": Claim("onebit", "scatter_reduce", 0.95 / 1.604, 0.604),
    "bert-large": Claim("onebit", "scatter_reduce", 0.95 / 1.441, 0.441),
    "bert-base": Claim("onebit", "scatter_reduce", 0.90 / 1.286, 0.286, 56e9),
    "resnet50": Claim("dgc", "ring", 0.95 / 1.207, 0.207),
    "transformer": Claim("dgc", "ring", 0.47, 1.014),
    "ugatit": Claim("minmax", "scatter_reduce", 0.95 / 2.1, 1.1),
    "lstm": Claim("minmax", "scatter_reduce", 0.95 / 2.1, 1.1),
}
COLLECTIVE = Costs(
    1,
    (LinkCosts(0.0, 0.0),),
    {"none": CodecCosts(FREE, FREE, FREE, LinearCost(0.0, 4.0))},
    add=LinearCost(0.0, 12 / MEMORY_BYTES_A_SECOND),
)


@dataclass(frozen=True)
class Figure:
    """One simulated step. The gain is relative to the dense ring. `claimed` is the paper's gain, if it gives one."""

    model: str
    nodes: int
    rate_bits: float
    method: str
    strategy: str
    step_seconds: float
    compute_seconds: float
    efficiency: float
    gain: float
    claimed: float | None


@functools.cache
def costs() -> Costs:
    """Costs of a node. All numbers of nodes are above `MOST_MERGED`, or equal to it."""
    return gpu_costs("onebit", "minmax", "dgc", host=machine_costs(["none"]), ranks=min(NODES))


def compute_of(seconds: float) -> Compute:
    return Compute(seconds / 3, seconds * 2 / 3)


def dense_ring(name: str, seconds: float, nodes: int, rate: float) -> StepResult:
    """The baseline."""
    model = SimulatedModel.of(models.get(name), compute_of(seconds))
    buckets = replace(model, gradients=list(_buckets(model.gradients)))
    cluster = Cluster(nodes, replace(link(), rate_bits=rate))
    return step(buckets, Plan("none", strategy="ring"), cluster, COLLECTIVE, fold=True)


def _buckets(gradients: Sequence[SimulatedGradient]) -> Iterator[SimulatedGradient]:
    held: list[SimulatedGradient] = []
    for index, grad in enumerate(gradients, 1):
        held.append(grad)
        elements = sum(each.spec.numel for each in held)
        if 4 * elements >= BUCKET_BYTES or index == len(gradients):
            yield SimulatedGradient(f"bucket.{index}", (elements, 1), grad.ready_seconds)
            held = []


def compressed(name: str, seconds: float, nodes: int, rate: float, method: str, strategy: str) -> StepResult:
    """gradwire's step."""
    model = SimulatedModel.of(models.get(name), compute_of(seconds))
    cluster = Cluster(nodes, replace(link(), rate_bits=rate))
    return step(model, Plan(method, strategy=strategy), cluster, costs(), fold=True)


def compute_seconds(name: str) -> float:
    """Computation time at which the dense ring is as efficient as in the paper, found by bisection."""
    claim, low, high = CLAIMS[name], 1e-3, 10.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        efficiency = dense_ring(name, middle, 16, claim.rate_bits).efficiency
        low, high = (middle, high) if efficiency < claim.ring_efficiency else (low, middle)
    return (low * high) ** 0.5


def figures(name: str, nodes: list[int], rates: list[float]) -> Iterator[Figure]:
    """Dense ring and HiPress's method of one model."""
    claim, seconds = CLAIMS[name], compute_seconds(name)
    for count, rate in itertools.product(nodes, rates):
        dense = dense_ring(name, seconds, count, rate)
        row = (name, count, rate)
        yield Figure(*row, "none", "ring", dense.seconds, seconds, dense.efficiency, 0.0, None)
        for strategy in dict.fromkeys((claim.strategy, "scatter_reduce")):
            result = compressed(name, seconds, count, rate, claim.method, strategy)
            is_claim = (count, rate, strategy) == (16, claim.rate_bits, claim.strategy)
            gain = dense.seconds / result.seconds - 1
            found = (result.seconds, seconds, result.efficiency, gain, claim.gain if is_claim else None)
            yield Figure(*row, claim.method, strategy, *found)


def describe(row: Figure) -> str:
    return (
        f"{row.model:12} {row.nodes:5} nodes {row.rate_bits / 1e9:4.0f} Gb/s  {row.method:7} {row.strategy:15} "
        f"{1e3 * row.step_seconds:9.2f} ms  efficiency {row.efficiency:4.2f}  gain {row.gain:+7.1%}"
        + ("" if row.claimed is None else f"  paper {row.claimed:+.1%}")
    )


def run(
    chosen_models: Annotated[str, typer.Option("--models", help="Models, such as vgg19.")] = "",
    nodes: Annotated[str, typer.Option(help="Numbers of nodes, such as 16,64.")] = "",
    rates: Annotated[str, typer.Option(help="Bits a second, such as 10e9.")] = "",
) -> Iterator[Row]:
    """Run all models."""
    for name in choose(chosen_models, list(CLAIMS)):
        for row in figures(name, choose(nodes, NODES), choose(rates, RATES)):
            print(describe(row), flush=True)
            yield asdict(row)


def table(rows: Sequence[Row]) -> str:
    """One line for each step."""
    return "\n".join(describe(Figure(*(row[each.name] for each in fields(Figure)))) for row in rows)
