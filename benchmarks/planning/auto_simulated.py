"""`auto` at 10 Gb/s and above, simulated, compared with DDP's own all-reduce in fp32 and fp16.

The lab reaches about 1 Gb/s, where its processors become the bottleneck. Here the planner plans, the synchronizer's
graphs run in virtual time, and `auto` decides as in a job, with simulated steps for its trials. DDP's own all-reduce is
a ring with buckets of 25 MB that costs nothing but its bytes, latency and additions at memory speed, in fp16 not even
the casts, and is therefore faster than a real one. There are two machines: this one's cores with everything that the
fidelity "balanced" allows, and the described GPU (`benchmarks.planning.described`) with what has device code of it.

Published models compute for 150 ms. The models of `never-slower` have the timeline of their backward pass on this
machine, and its cores only. `text`, `deep` and `blocks` are trained without momentum, so that `threelc` is allowed.

The verdict at the end says in how many cells the step of `auto` is slower than 1 / 0.99 times the better dense step. It
also judges the plan alone, as in a job that pins the plan and tries nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any

import torch
import typer

from benchmarks.data.cifar import ResNet
from benchmarks.options import choose
from benchmarks.papers.dragonn.vision import BLOCKS, WIDTH, Cifar10
from benchmarks.planning.described import LATENCY_SECONDS, MEMORY_BYTES_A_SECOND, gpu_costs, link
from benchmarks.planning.device_counts import has_device_code
from gradwire import planner
from gradwire.bench.probe_job import ProbeJob, builtin
from gradwire.bench.timeline import measure
from gradwire.planner import PlanTable
from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import FREE, LinearCost
from gradwire.planner.fidelity import RankedCompressor, methods
from gradwire.planner.options import FIRST_BUCKET_BYTES, for_ranks
from gradwire.simulate import Cluster, Compute, SimulatedGradient, SimulatedModel, models, step
from gradwire.simulate.machine import machine_costs
from gradwire.sync.plan import Plan
from gradwire.tuning import choice
from gradwire.tuning.candidates import NATIVE, NATIVE_FP16, Candidate
from gradwire.tuning.choice import margin

PUBLISHED = ("resnet50", "bert-base", "vgg19", "lstm", "transformer")
OWN = ("text", "deep", "blocks", "vision")
"""Workloads of `benchmarks.planning.never_slower`."""
MODELS, RANKS, RATES = (*PUBLISHED, *OWN), (4, 16), (10e9, 25e9, 100e9)
MACHINES = ("core", "gpu")
COMPUTE = Compute(0.05, 0.1)
BUCKET_BYTES = 25 << 20
BOUND = 0.99
KEY, CHOICES = ("machine", "model", "ranks", "rate_bits"), ("machines", "chosen_models", "num_ranks", "rates")
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One model on one cluster. Seconds per step; `gain` and `plan_gain` are the better dense step over the other."""

    machine: str
    model: str
    ranks: int
    rate_bits: float
    fp32: float
    fp16: float
    plan: float
    auto: float
    way: str
    plan_gain: float
    gain: float


@functools.cache
def model_of(name: str) -> SimulatedModel:
    """A published model, or a workload with the timeline that its backward pass has here."""
    if name in PUBLISHED:
        return SimulatedModel.of(models.get(name), COMPUTE, BUCKET_BYTES)
    torch.set_num_threads(1)  # as in a rank of the lab
    images = torch.rand(Cifar10.batch_size, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    job = ProbeJob(name, ResNet(BLOCKS, WIDTH), (images,)) if name == "vision" else builtin(name, 0, 1)
    found = measure(job)
    gradients = [SimulatedGradient(each.name, each.shape, each.ready) for each in found.gradients]
    gradients.sort(key=lambda each: each.ready_seconds)
    return SimulatedModel(gradients, Compute(found.rest, found.backward), BUCKET_BYTES, name)


@functools.cache
def costs_of(machine: str, ranks: int, momentum: bool) -> tuple[Costs, list[RankedCompressor]]:
    """Costs of a machine, and the compressors to choose from."""
    allowed = methods("balanced", momentum=momentum)
    if machine == "gpu":
        allowed = [method for method in allowed if has_device_code(method.spec)]
        return gpu_costs(*(method.spec for method in allowed), host=machine_costs(["none"]), ranks=ranks), allowed
    return machine_costs([method.spec for method in allowed]), allowed


def buckets_of(gradients: Sequence[SimulatedGradient]) -> list[list[SimulatedGradient]]:
    """Buckets as DDP fills them."""
    found: list[list[SimulatedGradient]] = [[]]
    for grad in gradients:
        if sum(each.spec.nbytes for each in found[-1]) >= (BUCKET_BYTES if len(found) > 1 else FIRST_BUCKET_BYTES):
            found.append([])
        found[-1].append(grad)
    return found


def native_step(model: SimulatedModel, cluster: Cluster, dtype: torch.dtype) -> float:
    """Step with DDP's own all-reduce, one ring per bucket."""
    free = CodecCosts(FREE, FREE, FREE, LinearCost(0.0, 4.0))
    add = LinearCost(0.0, 3 * dtype.itemsize / MEMORY_BYTES_A_SECOND)
    costs = Costs(1, (LinkCosts(0.0, 0.0),), {"none": free}, add=add)
    whole = [
        SimulatedGradient(
            f"bucket.{index}", (sum(each.spec.numel for each in bucket), 1), bucket[-1].ready_seconds, dtype
        )
        for index, bucket in enumerate(buckets_of(model.gradients))
    ]
    return step(SimulatedModel(whole, model.compute), Plan("none", strategy="ring"), cluster, costs).seconds


def predictions(
    model: SimulatedModel, costs: Costs, allowed: Sequence[RankedCompressor], ranks: int, rate: float
) -> tuple[list[PlanTable], dict[Candidate, float]]:
    """The planner's plans for a job on these links, and the predicted steps of DDP's own methods.

    The first plan is what `auto` tries, which gains over DDP fp32. The second one is pinned by `gradwire plan`, and
    gains over the fp16 hook, too.
    """
    known = replace(for_ranks(costs, ranks), links=(LinkCosts(LATENCY_SECONDS, 8 / rate),), native=None)
    tensors = [
        planner.PlannedTensor(each.name, each.shape, ready=bucket[-1].ready_seconds)
        for bucket in buckets_of(model.gradients)
        for each in bucket
    ]
    backward, rest = model.compute.backward_seconds, model.compute.forward_seconds
    natives = planner.natives(planner.buckets_of(tensors, BUCKET_BYTES), known, ("fp32", "fp16"))
    fp32, fp16 = (rest + max(backward, natives[kind].finish) for kind in ("fp32", "fp16"))
    tables = [
        planner.plan(tensors, known, allowed, backward=backward, rest=rest, bucket_bytes=BUCKET_BYTES, native=kinds)
        for kinds in (("fp32",), ("fp32", "fp16"))
    ]
    return tables, {NATIVE: fp32, NATIVE_FP16: fp16}


def decide(predicted: dict[Candidate, float], simulated: dict[Candidate, float]) -> Candidate:
    """The choice of `auto`, which tries what may be faster than what it knows (`Autopilot`)."""
    tried = {NATIVE: simulated[NATIVE]}
    for candidate in sorted(predicted, key=lambda each: (predicted[each], each.name)):
        if candidate not in tried and choice.worth_a_trial(candidate, predicted[candidate], min(tried.values())):
            tried[candidate] = simulated[candidate]
    return choice.choose(tried, margin)


def cell(machine: str, costs: Costs, allowed: Sequence[RankedCompressor], name: str, ranks: int, rate: float) -> Cell:
    """All ways of one model on one cluster."""
    cluster = Cluster(ranks, replace(link(), rate_bits=rate))
    model = model_of(name)
    simulated = {
        NATIVE: native_step(model, cluster, torch.float32),
        NATIVE_FP16: native_step(model, cluster, torch.float16),
    }
    (tried, pinned), predicted = predictions(model, costs, allowed, ranks, rate)
    if not tried.native:
        candidate = Candidate.of(tried)
        predicted[candidate] = tried.step
        simulated[candidate] = step(model, tried.plan(), cluster, costs).seconds
    chosen = decide(predicted, simulated)
    planned = simulated[{"fp32": NATIVE, "fp16": NATIVE_FP16}[pinned.native_kind] if pinned.native else candidate]
    dense = min(simulated[NATIVE], simulated[NATIVE_FP16])
    return Cell(
        *(machine, name, ranks, rate, simulated[NATIVE], simulated[NATIVE_FP16], planned, simulated[chosen]),
        *(chosen.name, dense / planned, dense / simulated[chosen]),
    )


def describe(row: Cell) -> str:
    return (
        f"{row.machine:5} {row.model:12} {row.ranks:3} ranks {row.rate_bits / 1e9:4.0f} Gb/s   fp32 "
        f"{1e3 * row.fp32:8.2f}   fp16 {1e3 * row.fp16:8.2f}   plan {1e3 * row.plan:8.2f} ({row.plan_gain:.2f})   auto "
        f"{1e3 * row.auto:8.2f} ms ({row.gain:.2f}): {row.way}"
    )


def verdict(rows: Sequence[Cell]) -> str:
    """Whether `auto`, or the plan alone, is ever slower than the better dense step."""
    below = [row for row in rows if row.gain < BOUND]
    alone = [row for row in rows if row.plan_gain < BOUND]
    return (
        f"auto: {len(below)} of {len(rows)} cells below {BOUND} of the better dense step, the least "
        f"{min(row.gain for row in rows):.3f}; the plan alone, without trials: {len(alone)}, the least "
        f"{min(row.plan_gain for row in rows):.3f}"
    )


def run(
    machines: Annotated[str, typer.Option(help="core, gpu, or both.")] = "",
    chosen_models: Annotated[str, typer.Option("--models", help="Models, such as vgg19.")] = "",
    num_ranks: Annotated[str, typer.Option("--ranks", help="Numbers of ranks, such as 4,16.")] = "",
    rates: Annotated[str, typer.Option(help="Bits a second, such as 10e9.")] = "",
) -> Iterator[Row]:
    """All cells."""
    chosen = choose(machines, MACHINES), choose(chosen_models, MODELS), choose(num_ranks, RANKS), choose(rates, RATES)
    for machine, name, ranks, rate in itertools.product(*chosen):
        if machine == "core" or name in PUBLISHED:
            momentum = name in PUBLISHED or name == "vision"
            found = cell(machine, *costs_of(machine, ranks, momentum), name, ranks, rate)
            print(describe(found), flush=True)
            yield asdict(found)


def table(rows: Sequence[Row]) -> str:
    """One line for each cell, and the verdict."""
    cells = [Cell(*(row[each.name] for each in fields(Cell))) for row in rows]
    return "\n".join([*map(describe, cells), verdict(cells)])
