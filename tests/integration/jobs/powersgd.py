"""The same training with DDP alone, with torch's PowerSGD hook and with gradwire's."""

from __future__ import annotations

import itertools

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import gradwire as gw
from tests.integration.jobs.training import batches, fingerprint, loss_of, model, wrap

METHODS = ("dense", "torch", "gradwire")


def losses(rank: int, world_size: int, steps: int, low: int) -> dict[str, object]:
    """By method the loss on one large batch after `steps`, and a hash of the parameters."""
    return {method: _train(method, rank, world_size, steps, low) for method in METHODS}


def _train(method: str, rank: int, world_size: int, steps: int, low: int) -> tuple[float, str]:
    # One bucket: with more than one, torch's hook hangs on Gloo.
    ddp = wrap(model(), bucket_cap_mb=25.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = None
    if method == "torch":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=low, start_powerSGD_iter=2, min_compression_rate=1
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif method == "gradwire":
        rules = {"*.weight": gw.make("powersgd", rank=low), "*": "none"}
        handle = gw.attach(ddp, rules, optimizer=optimizer)
    for batch in itertools.islice(batches(rank, world_size), steps):
        optimizer.zero_grad()
        loss_of(ddp, batch).backward()
        optimizer.step()
    if handle is not None:
        handle.detach()
    with torch.no_grad():
        found = float(loss_of(ddp.module, next(batches(0, 1, size=1500, seed=9))))
    return found, fingerprint(ddp.parameters())
