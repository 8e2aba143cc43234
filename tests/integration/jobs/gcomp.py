"""Training with gcomp and lossless compared with DDP's own sum, on real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def train(
    rank: int, world_size: int, methods: list[list[str]], optimizer: str, steps: int, in_closure: bool
) -> dict[str, Any]:
    """For each of (method, strategy): how far parameters are from those of `none`, their sum, and bytes over dense."""
    found: dict[str, Any] = {}
    expected = _train(rank, "none", "scatter_reduce", optimizer, steps, False)[0]
    for method, strategy in methods:
        parameters, ratio = _train(rank, method, strategy, optimizer, steps, in_closure)
        found[f"{method} {strategy}"] = {
            "off": float((parameters - expected).abs().max()),
            "sum": parameters.double().sum().item(),
            "ratio": ratio,
        }
    return found


def mismatch(rank: int, world_size: int, strategy: str, in_closure: bool) -> dict[str, Any]:
    """Train with other parameters on rank 1, and say after which steps parameters have changed."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    with torch.no_grad():
        ddp.module[0].weight.mul_(1 + 3 * rank)
    made = torch.optim.SGD(ddp.parameters(), lr=0.05)
    handle = gw.attach(ddp, gw.Plan("gcomp", strategy=strategy, min_elements=0), optimizer=made, check_every=0)
    changed, finite = [], []
    for step in range(3):
        before = torch.cat([parameter.detach().reshape(-1) for parameter in ddp.parameters()])
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(100 * step + rank))

        def backward(inputs: torch.Tensor = inputs) -> torch.Tensor:
            made.zero_grad()
            loss: torch.Tensor = ddp(inputs).square().mean()
            loss.backward()
            finite.append(all(bool(parameter.grad.isfinite().all()) for parameter in ddp.parameters()))
            return loss

        _step(made, backward, in_closure)
        after = torch.cat([parameter.detach().reshape(-1) for parameter in ddp.parameters()])
        changed.append(not torch.equal(before, after) and bool(after.isfinite().all()))
    common = handle.state_dict()["common"]
    handle.detach()
    return {"changed": changed, "finite": finite, "common": common}


def _step(optimizer: torch.optim.Optimizer, backward: Callable[[], torch.Tensor], in_closure: bool) -> None:
    if in_closure:
        optimizer.step(backward)
    else:
        backward()
        optimizer.step()


def _train(
    rank: int, method: str, strategy: str, optimizer: str, steps: int, in_closure: bool
) -> tuple[torch.Tensor, float]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    made = OPTIMIZERS[optimizer](ddp.parameters())
    handle = gw.attach(ddp, gw.Plan(method, strategy=strategy, min_elements=0), optimizer=made, check_every=1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs, targets = torch.randn(32, 64, generator=generator), torch.randint(0, 10, (32,), generator=generator)

        def backward(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            made.zero_grad()
            loss = nn.functional.cross_entropy(ddp(inputs), targets)
            loss.backward()
            return loss

        _step(made, backward, in_closure)
    ratio = handle.report().total.ratio
    handle.detach()
    return torch.cat([parameter.detach().reshape(-1) for parameter in ddp.parameters()]), ratio
