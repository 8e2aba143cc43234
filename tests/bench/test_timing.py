"""Steps are timed at the rate that they are reported for, and as many as fit into the time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench import methods
from gradwire.bench.job import BenchmarkJob, Segment
from gradwire.bench.rank import Rank
from gradwire.bench.timing import Steps, time_steps


@dataclass
class Durations(Steps):
    """Steps that say how long they have taken, by the rate of the links and whether they are the first of all."""

    def step(self) -> tuple[float, float]:
        self.steps += 1
        return 0.0, 5.0 if self.steps == 1 else 0.5 if self.rank._rate is None else 0.1


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("rate", "count"), [("1gbit", 40), (None, 8)])
def test_the_number_of_steps_follows_from_one_at_the_same_rate(rate: str | None, count: int) -> None:
    segment = Segment(methods.DDP_FP32, timed_seconds=4.0, min_timed=2, max_timed=100)
    rank = Rank(BenchmarkJob("digits", (segment,), folder=""))
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    steps = Durations(
        rank, segment, ddp, torch.optim.SGD(ddp.parameters()), methods.connect(segment.method, ddp, None, 0)
    )
    steps.step()
    rank._rate = rate
    assert time_steps(steps, 0, rate).seconds == [0.1 if rate else 0.5] * count
