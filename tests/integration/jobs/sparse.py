"""Jobs that add sparse payloads at the owners of positions (`sparse_reduce`)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

import gradwire as gw
from tests.integration.jobs.training import batches, fingerprint, loss_of, model, wrap

INFINITE = 3  # the step in which the last rank's loss is infinite


def trained(rank: int, world_size: int, methods: list[str], strategies: list[str], steps: int) -> dict[str, Any]:
    """Train with each method and strategy, with error feedback and with momentum correction; return what is found."""
    return {
        f"{method} {strategy} {feedback}": _train(rank, world_size, method, strategy, feedback, steps)
        for method in methods
        for feedback in ("error", "momentum", "momentum:masking=False")
        for strategy in strategies
    }


def _train(rank: int, world_size: int, method: str, strategy: str, feedback: str, steps: int) -> dict[str, Any]:
    """One training.

    Returns:
        Hashes of the synchronized gradients of all steps, of the parameters and of residuals and velocities;
        which steps were taken; which roles residuals have; and, unless masking deletes velocities: by how much what all
        ranks have produced differs from what was applied and what residuals hold, and the largest of these.
    """
    ddp = wrap(model())
    momentum = 0.0 if feedback == "error" else 0.9
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    plan = gw.Plan(gw.make(method), strategy=strategy, feedback=feedback, min_elements=0)
    handle = gw.attach(ddp, plan, optimizer=optimizer)
    names = [name for name, _ in ddp.module.named_parameters()]
    velocity, produced, applied = (
        {name: torch.zeros(each.numel(), dtype=torch.float64) for name, each in ddp.module.named_parameters()}
        for _ in range(3)
    )
    means, taken = [], []
    for step, batch in enumerate(itertools.islice(batches(rank, world_size), steps)):
        scale = float("inf") if step == INFINITE and rank == world_size - 1 else 1.0
        own = torch.autograd.grad(loss_of(ddp.module, batch) * scale, list(ddp.module.parameters()))
        optimizer.zero_grad()
        (loss_of(ddp, batch) * scale).backward()
        grads = [parameter.grad for parameter in ddp.module.parameters()]
        taken.append(all(bool(grad.isfinite().all()) for grad in grads))
        if not taken[-1]:
            continue
        means.append(fingerprint(grads))
        for name, mine, mean in zip(names, own, grads, strict=True):
            velocity[name] = momentum * velocity[name] + mine.double().flatten() / world_size
            produced[name] += velocity[name]
            applied[name] += mean.double().flatten()
        optimizer.step()
    state = handle.state_dict()["residuals"]
    handle.detach()
    found = {
        "means": means,
        "parameters": fingerprint(ddp.parameters()),
        "state": fingerprint(
            tensor for role in ("local", "velocity") for _, ranges in sorted(state.get(role, {}).items())
            for _, tensor in sorted(ranges.items())
        ),
        "taken": taken,
        "roles": sorted(role for role, held in state.items() if isinstance(held, dict) and held),
    }  # fmt: skip
    if feedback == "momentum":
        return found
    deviation = size = 0.0
    for name in names:
        held = torch.zeros_like(produced[name])
        for start, tensor in state["local"].get(name, {}).items():
            held[int(start) : int(start) + tensor.numel()] += tensor.double()
        for each in (produced[name], held):
            dist.all_reduce(each)
        deviation = max(deviation, (produced[name] - applied[name] - held).abs().max().item())
        size = max(size, produced[name].abs().max().item())
    return found | {"deviation": deviation, "size": size}
