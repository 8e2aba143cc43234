"""Extra costs of the lab compared with one idle core: a short calibration with its own steps.

Ranks that share cores wake each other up, find caches cold, and let the kernel split, shape and bridge packets one by
one. The calibration runs two kinds of dense steps:

- *chain*, one small tensor on a ring: the cost of waking a thread (*wake*), and *latency*.
- *large*, one tensor by ring and by all-gather: seconds per *byte* at each end of a frame, and how much longer bytes
  take in a ring than at the rate of the links (*pace*). A byte costs the kernel more where a rank sends to several
  others at once, in shorter packets with more acknowledgements. So a ring, in which it sends to one, and the other
  strategies have a figure each, unless processors were busy for too short a time to tell them apart.

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
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradwire.core.spec import TensorSpec
from gradwire.planner.costs import Costs
from gradwire.planner.curves import LinearCost
from gradwire.simulate import Cluster, SimulatedGradient, SimulatedLink, SimulatedModel, StepResult, step
from gradwire.sync.chunk import RANGE_ALIGNMENT
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer

SMALL_STEPS, GAP_SECONDS = 20, 0.05
LARGE_SECONDS, LARGE_REPEATS, MIN_LARGE_STEPS, LARGE_ELEMENTS = 1.0, 3, 2, (1 << 15, 1 << 19)
SLACK = 1.05  # as exact as such steps can be timed
MIN_BUSY_SECONDS = 0.2  # of all steps of a kind; the kernel counts in hundredths


@dataclass(frozen=True)
class Measured:
    """Steps of one kind. Times are in seconds.

    Attributes:
        strategy: Strategy of a dense tensor.
        elements: Number of elements of the tensor.
        steps: Number of steps.
        seconds: Median step time of the slowest rank.
        processes: Processor time of all ranks' processes per step.
        busy: Busy time of the machine's cores per step, including the kernel's work for no process in particular.
    """

    strategy: str
    elements: int
    steps: int
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
    seconds_a_byte_to_several: float
    latency: float
    pace: float

    def costs(self, known: Costs, strategy: str) -> Costs:
        """The costs of an idle core, as they are in the lab."""
        seconds_a_byte = self.seconds_a_byte if strategy == "ring" else self.seconds_a_byte_to_several
        return replace(known, frame=LinearCost(known.frame(0), seconds_a_byte))

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
    found = Measured(strategy, elements, steps, 0.0, 0.0, 0.0)
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
    idle = known.frame(1.0) - known.frame(0.0)
    found = Calibration(0.0, idle, idle, 0.0, 1.0)

    def simulated(steps: Measured, **values: float) -> StepResult:
        trial = found._replace(**values)
        cluster = trial.cluster(ranks, rate_bits, cores)
        return step(SimulatedModel([steps.gradient]), steps.plan, cluster, trial.costs(known, steps.strategy))

    def bytes_of(steps: Measured, value: float) -> StepResult:
        return simulated(steps, seconds_a_byte=value, seconds_a_byte_to_several=value)

    def paid(*kinds: Measured) -> float:
        """Seconds per byte with which these steps keep processors busy for as long as in the lab."""
        most = sum(each.busy for each in kinds)
        value = solve(lambda each: sum(bytes_of(kind, each).processor_seconds for kind in kinds), most, 0.0, 1e-7)
        # Cores that take packets one by one from a slow link take them faster in larger numbers: bytes cost at most
        # what lets these steps be as fast as they were.
        least = min(value, idle)
        for kind in kinds:
            value = solve(lambda each, of=kind: bytes_of(of, each).seconds, SLACK * kind.seconds, least, value)
        return value

    wake = solve(lambda value: simulated(chain, wake=value).processor_seconds, chain.processes, 0.0, 2e-3)
    found = found._replace(wake=wake)
    apart = min(each.steps * each.busy for each in (ring, allgather)) >= MIN_BUSY_SECONDS
    to_one, to_several = (paid(ring), paid(allgather)) if apart else 2 * (paid(ring, allgather),)
    found = found._replace(seconds_a_byte=to_one, seconds_a_byte_to_several=to_several)
    latency = solve(lambda value: simulated(chain, latency=value).seconds, chain.seconds, 0.0, 1.0)
    found = found._replace(latency=latency)
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
