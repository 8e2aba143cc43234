"""Jobs whose model is on a GPU, which all ranks share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import gradwire as gw
from tests.integration.jobs.training import batches, fingerprint, loss_of, model, wrap


def train(
    rank: int, world_size: int, methods: list[str], strategy: str, steps: int, backend: str, device: str = "cuda"
) -> dict[str, Any]:
    """Train with each method: the hash of the parameters, whether they are finite, and the losses."""
    group = dist.new_group(backend=backend)
    found = {}
    for method in methods:
        ddp = wrap(model().to(device), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        losses, stream = [], batches(rank, world_size)
        with gw.attach(ddp, gw.Plan(method, strategy=strategy, min_elements=0)):
            for _ in range(steps):
                images, labels = next(stream)
                loss = loss_of(ddp, (images.to(device), labels.to(device)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        parameters = [each.detach().cpu() for each in ddp.parameters()]
        finite = all(bool(each.isfinite().all()) for each in parameters)
        found[method] = {"hash": fingerprint(parameters), "finite": finite, "losses": losses}
    return found


def compare(rank: int, world_size: int, device: str = "cuda") -> float:
    """The largest difference of a gradient with `none` from that of DDP's own all-reduce, relative to the largest."""
    images, labels = next(batches(rank, world_size))
    gradients = []
    for attached in (False, True):
        ddp = wrap(model().to(device))
        handle = gw.attach(ddp, "none") if attached else None
        loss_of(ddp, (images.to(device), labels.to(device))).backward()
        gradients.append([parameter.grad.clone() for parameter in ddp.parameters()])
        if handle is not None:
            handle.detach()
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*gradients, strict=True))
