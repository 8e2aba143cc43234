"""Ranks that synchronize one tensor through an aggregator."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from gradwire.core.spec import TensorSpec
from gradwire.sync.plan import Plan
from gradwire.sync.synchronizer import GradientSlice, Synchronizer
from tests.sync.harness import ranks
from tests.sync.local_aggregator import LocalAggregator, LocalOptions

NUMEL, SEED = 9000, 3
PACKET = 2048
Gradient = Callable[[int, int], torch.Tensor]


def gradient(rank: int, step: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + step)) * (1 + rank)


def take_step(one: Synchronizer, step: int, make: Gradient = gradient, used: bool = True) -> torch.Tensor:
    one.begin_step()
    grad = make(one.rank, step) if used else torch.zeros(NUMEL)
    one.submit([GradientSlice("w", grad, used=used)])
    one.wait()
    one.commit()
    return grad


def group_of(
    world_size: int, codec: Any, aggregator: LocalAggregator, fraction: float = 1.0, mtu: int = 0,
    late: str = "kept", divide_by: str = "counted", fill_after: timedelta | None = None, **options: Any,
) -> Any:  # fmt: skip
    plan = Plan({"w": codec}, strategy="server", **options)
    server = LocalOptions(
        "local:1", fraction, late, divide_by, fill_after=fill_after, packet_elements=PACKET, mtu=mtu,
        aggregator=aggregator,
    )  # fmt: skip
    return ranks(world_size, plan, seed=SEED, server=server, tensors={"w": TensorSpec((NUMEL,))})
