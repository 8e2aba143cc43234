"""A script that changes torch's defaults, as some do to create their models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from tests.integration.jobs.training import fingerprint

METHODS = {
    **{name: name for name in ("none", "lossless", "threelc", "onebit", "topk", "thc", "powersgd", "int8shared")},
    "dragonn with momentum": gw.Plan("dragonn:ratio=0.05", feedback="momentum:momentum=0.9", min_elements=0),
}


def changes_them(rank: int, world_size: int) -> dict[str, list[str]]:
    """The parameters that three steps end with, by method: without and with each change of a default."""
    return {name: [_train(method, change, rank) for change in _CHANGES] for name, method in METHODS.items()}


_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"set_default_dtype": torch.bfloat16},
    {"set_default_dtype": torch.float64},
    {"set_default_device": "meta"},
)


def _train(method: Any, change: dict[str, Any], rank: int) -> str:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    inputs = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(rank))
    for name, value in change.items():
        getattr(torch, name)(value)
    try:
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        with gw.attach(ddp, method, optimizer=optimizer) as handle:
            for batch in inputs:
                optimizer.zero_grad()
                ddp(batch).square().mean().backward()
                optimizer.step()
            handle.load_state_dict(handle.gather_state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    return fingerprint(ddp.parameters())
