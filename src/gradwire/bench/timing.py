"""Timed steps of one rank, and their costs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench import methods
from gradwire.bench.job import Progress, Segment, TimedSteps
from gradwire.bench.rank import Rank
from gradwire.lab.counters import interface_counters


@dataclass
class Steps(ABC):
    """Steps that can be timed: of a training, or of a replay.

    Attributes:
        rank: This rank.
        segment: Segment to run.
        ddp: Module with the method attached.
        optimizer: Its optimizer.
        connection: The method, which counts costs.
        steps: Number of steps taken.
    """

    rank: Rank
    segment: Segment
    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    connection: methods.ConnectedMethod
    steps: int = field(default=0, init=False)

    @abstractmethod
    def step(self) -> tuple[float, float]:
        """Take one step; return its loss and its duration in seconds."""


def time_steps(training: Steps, index: int, rate: str | None) -> TimedSteps:
    """Time steps at a rate, as many as the segment asks for and the first one suggests.

    Args:
        training: Training or replay, which has taken a step already.
        index: Index of its segment.
        rate: Rate of the links.
    """
    rank, segment = training.rank, training.segment
    rank.set_rate(rate)
    # A training at this rate has settled already, unless it was too short or other rates came between.
    has_settled = segment.train_steps > 0 and rate == segment.train_rate == segment.rates[0]
    settled, settling = settle(training, restart=not has_settled)
    dist.barrier()
    counters = interface_counters() if rank.job.shaped else None
    costs = training.connection.costs(training.steps)
    seconds: list[float] = []
    processor = time.process_time()
    steps = segment.min_timed
    while len(seconds) < steps:
        seconds.append(training.step()[1])
        if len(seconds) == 1:
            steps = rank.agree(_num_timed(segment, seconds[0]))
        rank.progress(Progress(index, "timed", len(seconds), steps, rate=rate))
    processor = time.process_time() - processor
    spent = training.connection.costs(training.steps) - costs
    dist.barrier()  # everything sent has arrived
    traffic = interface_counters() - counters if counters else None
    return TimedSteps(
        rate,
        seconds,
        **asdict(spent),
        interface_bytes=traffic.bytes_sent if traffic else None,
        interface_packets=traffic.packets_sent if traffic else None,
        processor_seconds=processor,
        settled=settled,
        settling_seconds=settling,
    )


def settle(training: Steps, restart: bool = True) -> tuple[str | None, float]:
    """Let the method adapt to the links. Return what ``auto`` has settled on, and the seconds that this took it."""
    began = time.perf_counter()
    settled = training.connection.settle(training.step, restart=restart)
    return settled, 0.0 if settled is None else time.perf_counter() - began


def _num_timed(segment: Segment, step_seconds: float) -> int:
    return max(segment.min_timed, min(segment.max_timed, round(segment.timed_seconds / step_seconds)))
