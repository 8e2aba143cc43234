"""Gain of HiPress's bulk coordinator, simulated: clusters, rates and models with and without it.

Models with many small tensors (ResNet50, BERT-base) and with few large ones (VGG19), with onebit and co-located
servers, the strategy whose senders compete for receivers. Ways to send: each message when it is ready; batches made by
each rank itself; the time slots of `SyncOptions(time_slots=True)`; batches of the coordinator, with the best of some
thresholds and time-outs. Batches cost less than in reality (`gradwire.simulate.bulk`). With `--queue`, the switch loses
what its small buffers cannot hold.

There are two machines, this one's cores as measured and the described GPU, with frames whose bytes the network card
copies.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any

import typer

from benchmarks.options import choose
from benchmarks.planning.described import gpu_costs, link
from gradwire.lab.units import parse_queue
from gradwire.planner.costs import Costs
from gradwire.planner.curves import LinearCost
from gradwire.simulate import Bulk, Cluster, Compute, SimulatedModel, models, step
from gradwire.simulate.machine import machine_costs
from gradwire.simulate.sweep import SweepMethod

RANKS, RATES, MODELS = (4, 8, 16), (1e9, 10e9, 100e9), ("resnet50", "bert-base", "vgg19")
MACHINES = ("core", "gpu")
METHOD = SweepMethod("onebit", "scatter_reduce")
ALONE, SLOTS = Bulk(coordinated=False), Bulk.slots()
COORDINATED = tuple(Bulk(size, wait) for size in (64 << 10, 1 << 20) for wait in (0.0, 500e-6))
COMPUTE = Compute(0.05, 0.1)
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One simulated step. The gain is relative to the same step without batches."""

    machine: str
    model: str
    ranks: int
    rate_bits: float
    way: str
    threshold_bytes: float
    timeout_seconds: float
    step_seconds: float
    compute_seconds: float
    gain: float


@functools.cache
def costs_of(machine: str, ranks: int) -> Costs:
    """Costs of a machine."""
    core = machine_costs([METHOD.spec])
    if machine == "gpu":
        return gpu_costs(METHOD.spec, host=core, ranks=ranks)
    return replace(core, frame=LinearCost(core.frame(0), 0.0))


def cells(machine: str, costs: Costs, name: str, ranks: int, rate: float, queue: int | None = None) -> Iterator[Cell]:
    """All variants on one cluster."""
    model = SimulatedModel.of(models.get(name), COMPUTE)
    cluster = Cluster(ranks, replace(link(), rate_bits=rate, queue_bytes=queue))

    def cell(way: str, bulk: Bulk | None, before: float | None) -> Cell:
        result = step(model, METHOD.plan(), cluster, costs, fold=False, bulk=bulk)
        gain = 0.0 if before is None else before / result.seconds - 1
        batch = (bulk.threshold_bytes, bulk.timeout_seconds) if bulk else (0.0, 0.0)
        return Cell(machine, name, ranks, rate, way, *batch, result.seconds, result.compute_seconds, gain)

    plain = cell("each message", None, None)
    yield plain
    yield cell("alone", ALONE, plain.step_seconds)
    yield cell("slots", SLOTS, plain.step_seconds)
    for bulk in COORDINATED:
        yield cell("coordinated", bulk, plain.step_seconds)


def describe(found: list[Cell]) -> str:
    """Describe a cluster in one line."""
    best = {cell.way: cell for cell in sorted(found, key=lambda cell: cell.gain)}
    plain, coordinated = best.pop("each message"), best["coordinated"]
    gains = "".join(f"   {way} {best[way].gain:+6.1%}" for way in ("alone", "slots", "coordinated") if way in best)
    return (
        f"{plain.machine:5} {plain.model:10} {plain.ranks:4} {plain.rate_bits / 1e9:5.0f} Gb/s "
        f"{1e3 * plain.step_seconds:9.2f} ms{gains} "
        f"({coordinated.threshold_bytes / 1024:.0f} KiB, {1e6 * coordinated.timeout_seconds:.0f} us)"
    )


def run(
    num_ranks: Annotated[str, typer.Option("--ranks", help="Numbers of ranks, such as 4,8.")] = "",
    rates: Annotated[str, typer.Option(help="Bits a second, such as 10e9.")] = "",
    chosen_models: Annotated[str, typer.Option("--models", help="Models, such as vgg19.")] = "",
    queue: Annotated[str, typer.Option(help="Bytes that the switch holds for each receiver, such as 64kib.")] = "none",
) -> Iterator[Row]:
    """Run all clusters."""
    for machine in MACHINES:
        clusters = itertools.product(choose(chosen_models, MODELS), choose(num_ranks, RANKS), choose(rates, RATES))
        for name, ranks, rate in clusters:
            here = list(cells(machine, costs_of(machine, ranks), name, ranks, rate, parse_queue(queue)))
            print(describe(here), flush=True)
            yield from map(asdict, here)


def table(rows: Sequence[Row]) -> str:
    """One line for each cluster."""
    found = [Cell(*(row[each.name] for each in fields(Cell))) for row in rows]
    of = lambda cell: (cell.machine, cell.model, cell.ranks, cell.rate_bits)  # noqa: E731
    return "\n".join(describe(list(cluster)) for _, cluster in itertools.groupby(found, of))
