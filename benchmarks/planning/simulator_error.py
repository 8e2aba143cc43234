"""Error of the simulator: the same steps in simulation and in the lab, for numbers of ranks, rates and strategies.

Four matrices become ready one after another while ranks wait, as in a replayed backward pass. Synchronization and
network are real. The simulated cluster has this machine's cores, shared by all ranks, its measured costs, and links of
the lab's rate. The additional costs of ranks on shared cores are calibrated with other steps, just before and in the
same lab (`benchmarks.planning.calibration`). Nothing is fitted to the steps that are compared. A measured step lasts
from a moment that all ranks know until the slowest rank ends; figures are medians.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks import ranks as processes
from benchmarks.options import Rates, choose
from benchmarks.planning.calibration import Calibration, Measured, calibrate, common_moment, sleep_until
from benchmarks.planning.calibration import measure as measure_calibration
from benchmarks.ranks import say
from gradwire.core.spec import TensorSpec
from gradwire.lab import Lab
from gradwire.lab.units import parse_rate
from gradwire.simulate import Compute, SimulatedGradient, SimulatedModel, step
from gradwire.simulate.machine import machine_costs
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer

RANKS, RATES = (2, 4, 8), ("10mbit", "100mbit", "1gbit")
STRATEGIES, METHODS = ("ring", "scatter_reduce", "allgather"), ("none", "onebit")
BACKWARD_SECONDS = 0.05
GRADIENTS = [
    SimulatedGradient(f"layer{index}.weight", (128, 1024), BACKWARD_SECONDS * (index + 1) / 4) for index in range(4)
]
WARM_UPS, MIN_STEPS, MAX_STEPS, TIMED_SECONDS = 1, 3, 30, 2.0
BOUND = 0.15
Ranks = Annotated[str, typer.Option("--ranks", help="Numbers of ranks, such as 2,4.")]
Methods = Annotated[str, typer.Option("--methods", help="Compressors, such as none,onebit.")]
KEY, CHOICES = ("ranks", "rate", "strategy", "method"), ("num_ranks", "rates", "chosen_methods")


@dataclass(frozen=True)
class Comparison:
    """One kind of step in lab and simulation, in seconds, with percentiles and the calibration used."""

    ranks: int
    rate: str
    strategy: str
    method: str
    measured: float
    p20: float
    p80: float
    samples: int
    simulated: float
    error: float
    wake: float
    seconds_a_byte: float
    seconds_a_byte_to_several: float
    latency: float
    pace: float


# -- in the lab --------------------------------------------------------------------------------------------------


def worker(methods: list[str], rate: str) -> None:
    """One rank: print the calibration, then the seconds of steps, one line for each method and strategy."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    say(calibration=[asdict(each) for each in measure_calibration(rate_bits(rate))])
    for method in methods:
        for strategy in STRATEGIES:
            say(method=method, strategy=strategy, seconds=timed_steps(method, strategy))
    dist.destroy_process_group()


def timed_steps(method: str, strategy: str) -> list[float]:
    """Seconds of each step on the slowest rank."""
    tensors = {grad.name: torch.randn(grad.shape) for grad in GRADIENTS}
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    synchronizer = Synchronizer(None, Plan(method, strategy=strategy), tensors=specs)
    found: list[float] = []
    while len(found) < WARM_UPS + MIN_STEPS or (sum(found) < TIMED_SECONDS and len(found) < WARM_UPS + MAX_STEPS):
        begun = common_moment()
        sleep_until(begun)
        synchronizer.begin_step()
        for grad in GRADIENTS:
            sleep_until(begun + grad.ready_seconds)
            synchronizer.submit([GradientSlice(grad.name, tensors[grad.name])])
        synchronizer.wait()
        synchronizer.commit()
        seconds = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found.append(float(seconds))
    synchronizer.close()
    return found[WARM_UPS:]


def rate_bits(rate: str) -> float:
    """Of a link."""
    found = parse_rate(rate)
    assert found is not None, "all rates of this benchmark are shaped"
    return float(found)


def measure(ranks: int, rate: str, methods: list[str]) -> list[dict[str, Any]]:
    """The calibration, and steps of all methods and strategies, in a lab of their own."""
    command = processes.command(__name__, "worker", methods, rate)
    with Lab(ranks, rate) as lab:
        result = lab.run(command, env={"OMP_NUM_THREADS": "1"}, timeout=900).check()
    return processes.said(result)


# -- in virtual time ---------------------------------------------------------------------------------------------


def simulate(ranks: int, rate: str, method: str, strategy: str, found: Calibration) -> float:
    """Seconds of the same step."""
    cluster = found.cluster(ranks, rate_bits(rate), os.cpu_count() or 1)
    costs = found.costs(machine_costs([*METHODS]), strategy)
    model = SimulatedModel(GRADIENTS, Compute(backward_seconds=BACKWARD_SECONDS))
    return step(model, Plan(method, strategy=strategy), cluster, costs).seconds


def compare(ranks: int, rate: str, methods: list[str]) -> list[Comparison]:
    """Compare all methods and strategies on one cluster."""
    known = machine_costs([*METHODS])  # before the lab: measured where they are not kept
    calibration, *rows = measure(ranks, rate, methods)
    steps = [Measured(**each) for each in calibration["calibration"]]
    calibrated = calibrate(steps, known, ranks, rate_bits(rate), os.cpu_count() or 1)
    found = []
    for row in rows:
        seconds, method, strategy = sorted(row["seconds"]), str(row["method"]), str(row["strategy"])
        median, fifth = statistics.median(seconds), len(seconds) // 5
        simulated = simulate(ranks, rate, method, strategy, calibrated)
        spread = (median, seconds[fifth], seconds[-1 - fifth], len(seconds))
        error = simulated / median - 1
        found.append(Comparison(ranks, rate, strategy, method, *spread, simulated, error, *calibrated))
    return found


def describe(row: Comparison) -> str:
    return (
        f"{row.ranks:3} {row.rate:>8} {row.strategy:15} {row.method:8} measured {1e3 * row.measured:9.2f} ms   "
        f"simulated {1e3 * row.simulated:9.2f} ms   {row.error:+7.1%}"
    )


def describe_calibration(row: Comparison) -> str:
    return (
        f"{row.ranks:3} {row.rate:>8} waking {1e6 * row.wake:.0f} us, "
        f"{1e9 * row.seconds_a_byte:.2f} ns a byte, {1e9 * row.seconds_a_byte_to_several:.2f} to several, "
        f"latency {1e6 * row.latency:.0f} us, pace {row.pace:.2f}"
    )


def summary(rows: list[Comparison]) -> str:
    errors = [abs(row.error) for row in rows]
    within = sum(error <= BOUND for error in errors)
    return (
        f"off by {statistics.median(errors):.1%} in the median, by {max(errors):.1%} at most; {within} of {len(rows)} "
        f"steps within {BOUND:.0%}"
    )


def run(num_ranks: Ranks = "", rates: Rates = "", chosen_methods: Methods = "") -> Iterator[dict[str, Any]]:
    """All labs."""
    for ranks in choose(num_ranks, RANKS):
        for rate in choose(rates, RATES):
            here = compare(ranks, rate, choose(chosen_methods, METHODS))
            print("\n".join([describe_calibration(here[0]), *map(describe, here)]), flush=True)
            yield from map(asdict, here)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each kind of step, and how many of them are close."""
    found = [Comparison(*(row[each.name] for each in fields(Comparison))) for row in rows]
    return "\n".join([*map(describe, found), summary(found)])
