"""Extra costs of the lab compared with one idle core: a short calibration with its own steps.

Ranks that share cores wake each other up, find caches cold, and let the kernel split, shape and bridge packets one by
one. The calibration runs two kinds of dense steps:

- *chain*, one small tensor on a ring: the cost of waking a thread (*wake*), and *latency*.
- *large*, one tensor by ring and by all-gather: seconds per *byte* at each end of a frame, and how much longer bytes
  take in a ring than at the rate of the links (*pace*).

The cost of congestion, when ranks send to several others at once, is not calibrated: packets are lost at random, each
loss may cost a time-out, and a short calibration gave values from 1.0 to 2.5.

Each figure is the one with which the simulator reproduces the processor time or the step time of the calibration. No
other step is used.
"""

# Shapes: W = ranks.

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradwire.core.spec import TensorSpec
from gradwire.planner.costs import Costs, LinearCost
from gradwire.simulate import Cluster, SimulatedGradient, SimulatedLink, SimulatedModel, StepResult, step
from gradwire.sync.chunk import RANGE_ALIGNMENT
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer

SMALL_STEPS, GAP_SECONDS = 20, 0.05
LARGE_SECONDS, LARGE_REPEATS, MIN_LARGE_STEPS, LARGE_ELEMENTS = 1.0, 3, 2, (1 << 15, 1 << 19)
SLACK = 1.05  # as exact as such steps can be timed


@dataclass(frozen=True)
class Measured:
    """Steps of one kind. Times are in seconds.

    Attributes:
        strategy: Strategy of a dense tensor.
        elements: Number of elements of the tensor.
        seconds: Median step time of the slowest rank.
        processes: Processor time of all ranks' processes per step.
        busy: Busy time of the machine's cores per step, including the kernel's work for no process in particular.
    """

    strategy: str
    elements: int
    seconds: float
    processes: float
    busy: float

    @property
    def gradient(self) -> SimulatedGradient:
        return SimulatedGradient("calibration.weight", (1, self.elements))

    @property
    def plan(self) -> Plan:
        return Plan("none", strategy=self.strategy, min_elements=0)


class Calibration(NamedTuple):
    """What was found; see the module."""

    wake: float
    seconds_a_byte: float
    latency: float
    pace: float

    def costs(self, known: Costs) -> Costs:
        """The costs of an idle core, as they are in the lab."""
        return replace(known, frame=LinearCost(known.frame(0), self.seconds_a_byte))

    def cluster(self, ranks: int, rate_bits: float, cores: int) -> Cluster:
        """The lab."""
        return Cluster(ranks, SimulatedLink(rate_bits / self.pace, self.latency), cores=cores, wake_seconds=self.wake)


# -- in the lab --------------------------------------------------------------------------------------------------


def measure(rate_bits: float) -> list[Measured]:
    """Run the calibration's steps on this rank, among all: chain, large by ring and by all-gather."""
    ranks = dist.get_world_size()

    def large(strategy: str, share: float) -> Measured:
        """So many steps that links are busy for a second; the least busy of some times: others' work only adds."""
        most = LARGE_SECONDS * rate_bits / 32 / share
        elements = int(min(max(most / MIN_LARGE_STEPS, LARGE_ELEMENTS[0]), LARGE_ELEMENTS[1]))
        steps = max(MIN_LARGE_STEPS, int(most / elements))
        found = [_measure(strategy, elements, steps, 0.0) for _ in range(LARGE_REPEATS)]
        return replace(
            min(found, key=lambda each: each.busy), seconds=statistics.median(each.seconds for each in found)
        )

    return [
        _measure("ring", ranks * RANGE_ALIGNMENT, SMALL_STEPS, GAP_SECONDS),
        large("ring", 2 * (ranks - 1) / ranks),
        large("allgather", ranks - 1),
    ]


def _measure(strategy: str, elements: int, steps: int, gap_seconds: float) -> Measured:
    """Steps of one kind, after one to warm up: one behind another, or with all ranks asleep before each."""
    found = Measured(strategy, elements, 0.0, 0.0, 0.0)
    name, value = found.gradient.name, torch.randn(found.gradient.shape)
    synchronizer = Synchronizer(None, found.plan, tensors={name: TensorSpec.of(value)})

    def run() -> None:
        synchronizer.begin_step()
        synchronizer.submit([GradientSlice(name, value)])
        synchronizer.wait()
        synchronizer.commit()

    run()
    first = common_moment()
    sleep_until(first)
    busy, own, begins, ends = busy_seconds(), time.process_time(), [], []
    for index in range(steps):
        sleep_until(first + index * gap_seconds)
        begins.append(max(first + index * gap_seconds, ends[-1] if ends else first))
        run()
        ends.append(time.perf_counter())
    sleep_until(first + steps * gap_seconds)
    busy, own = busy_seconds() - busy, time.process_time() - own
    seconds = torch.tensor(ends, dtype=torch.float64) - torch.tensor(begins, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    processes = torch.tensor([own], dtype=torch.float64)
    dist.all_reduce(processes)
    synchronizer.close()
    median = statistics.median(seconds.tolist())
    return replace(found, seconds=median, processes=float(processes) / steps, busy=busy / steps)


def common_moment() -> float:
    """A moment of the machine's clock, known to all ranks, shortly after the last of them asks."""
    moment = torch.tensor([time.perf_counter()], dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    return float(moment) + 0.01


def sleep_until(moment: float) -> None:
    """Sleep until a moment of `time.perf_counter`."""
    time.sleep(max(0.0, moment - time.perf_counter()))


def busy_seconds() -> float:
    """Total time that the machine's cores have not been idle since some moment."""
    idle = [float(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[4:6]]
    cores = os.cpu_count() or 1
    return cores * time.perf_counter() - sum(idle) / os.sysconf("SC_CLK_TCK")


# -- in virtual time ---------------------------------------------------------------------------------------------


def calibrate(measured: list[Measured], known: Costs, ranks: int, rate_bits: float, cores: int) -> Calibration:
    """Find the figures with which the simulator takes as long as the lab.

    Args:
        measured: Result of `measure`.
        known: Costs of one idle core.
        ranks: Number of ranks in the lab.
        rate_bits: Rate of its links.
        cores: Cores that the ranks share.
    """
    chain, ring, allgather = measured
    found = Calibration(0.0, known.frame(1.0) - known.frame(0.0), 0.0, 1.0)

    def simulated(steps: Measured, **values: float) -> StepResult:
        trial = found._replace(**values)
        cluster = trial.cluster(ranks, rate_bits, cores)
        return step(SimulatedModel([steps.gradient]), steps.plan, cluster, trial.costs(known))

    def time_of(steps: Measured, name: str, value: float) -> float:
        return simulated(steps, **{name: value}).seconds

    def work(*kinds: Measured, **values: float) -> float:
        return sum(simulated(each, **values).processor_seconds for each in kinds)

    found = found._replace(wake=solve(lambda value: work(chain, wake=value), chain.processes, 0.0, 2e-3))
    paid = solve(lambda value: work(ring, allgather, seconds_a_byte=value), ring.busy + allgather.busy, 0.0, 1e-7)
    # Cores that take packets one by one from a slow link take them faster in larger numbers: bytes cost at most what
    # lets these steps be as fast as they were.
    least = min(paid, found.seconds_a_byte)
    for steps in (ring, allgather):
        paid = solve(partial(time_of, steps, "seconds_a_byte"), SLACK * steps.seconds, least, paid)
    found = found._replace(seconds_a_byte=paid)
    found = found._replace(latency=solve(partial(time_of, chain, "latency"), chain.seconds, 0.0, 1.0))
    # A ratio, not a root: where processors set the pace, no link is slow enough to explain the rest.
    return found._replace(pace=max(1.0, ring.seconds / simulated(ring).seconds))


def solve(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where an increasing function reaches a target, approximately; the nearer end of the range if it does not."""
    if rising(low) >= target:
        return low
    while high - low > 2e-3 * high and high > 1e-12:
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) >= target else (middle, high)
    return high
