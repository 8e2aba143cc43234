"""Steps are timed at the rate that they are reported for, and as many as fit into the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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


class Settling:
    """A connected method that notes whether it was told to start over."""

    def __init__(self, inner: methods.ConnectedMethod) -> None:
        self.inner = inner
        self.restarts: list[bool] = []

    def settle(self, step: Callable[[], object], *, restart: bool = True) -> str | None:
        self.restarts.append(restart)
        return self.inner.settle(step, restart=restart)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


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


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("rates", "restarts"), [(("100mbit", "1gbit"), [True, True]), (("1gbit", "100mbit"), [False, True])]
)
def test_what_was_decided_in_training_holds_for_the_first_rate_alone(rates: tuple[str, ...], restarts: list[bool]):
    segment = Segment(methods.DDP_FP32, train_steps=5, train_rate="1gbit", min_timed=1, max_timed=1, rates=rates)
    rank = Rank(BenchmarkJob("digits", (segment,), folder=""))
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    connection = Settling(methods.connect(segment.method, ddp, None, 0))
    steps = Durations(rank, segment, ddp, torch.optim.SGD(ddp.parameters()), connection)
    for rate in rates:
        rank._rate = rate
        time_steps(steps, 0, rate)
    assert connection.restarts == restarts
