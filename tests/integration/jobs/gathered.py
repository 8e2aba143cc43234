"""States of all ranks in one document: saved by one rank, loaded by all, also by fewer."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from tests.integration.jobs.training import batches, fingerprint, loss_of, model, wrap

STEPS = 5
METHODS = {"0.weight": "powersgd", "2.*": "topk:ratio=0.05", "*": "threelc"}  # powersgd has a state of its own


def job(group: Any = None, **options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer, gw.Handle]:
    ddp = wrap(model(), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    plan = gw.Plan(METHODS, min_elements=0)
    return ddp, optimizer, gw.attach(ddp, plan, optimizer=optimizer, options=gw.SyncOptions(**options))


def train(ddp: Any, optimizer: torch.optim.Optimizer, rank: int, world_size: int, start: int, stop: int) -> str:
    for batch in itertools.islice(batches(rank, world_size), start, stop):
        optimizer.zero_grad()
        loss_of(ddp, batch).backward()
        optimizer.step()
    return fingerprint(ddp.parameters())


def resume(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train without a break; then from a file of rank 0, and from a torch.distributed.checkpoint."""
    ddp, optimizer, handle = job()
    train(ddp, optimizer, rank, world_size, 0, STEPS)
    document = handle.gather_state_dict(rank0_only=True)
    if rank == 0:
        torch.save(document, Path(folder) / "gathered.pt")
    everywhere = handle.gather_state_dict()
    rest = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save({"gradwire": handle.stateful}, checkpoint_id=Path(folder) / "dcp")
    torch.save(rest, Path(folder) / f"rest.{rank}.pt")
    hashes = [train(ddp, optimizer, rank, world_size, STEPS, 2 * STEPS)]
    handle.detach()
    for source in ("file", "dcp"):
        ddp, optimizer, handle = job()
        rest = torch.load(Path(folder) / f"rest.{rank}.pt", weights_only=True)
        ddp.module.load_state_dict(rest["model"])
        optimizer.load_state_dict(rest["optimizer"])
        if source == "file":
            handle.load_state_dict(torch.load(Path(folder) / "gathered.pt", weights_only=True))
        else:
            dcp.load({"gradwire": handle.stateful}, checkpoint_id=Path(folder) / "dcp")
        hashes.append(train(ddp, optimizer, rank, world_size, STEPS, 2 * STEPS))
        handle.detach()
    states = document.get("states", [])
    own = everywhere["states"][rank]
    return {
        "hashes": hashes,
        "ranks": [state["rank"] for state in states],
        "roles": sorted(key for key in own["residuals"] if own["residuals"][key]),
    }


def fewer(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """All ranks save by a checkpoint; the first two go on, and together hold what all have held."""
    ddp, optimizer, handle = job()
    train(ddp, optimizer, rank, world_size, 0, STEPS)
    before = total(handle.gather_state_dict()["states"])
    dcp.save({"gradwire": handle.stateful}, checkpoint_id=Path(folder))
    handle.detach()
    group = dist.new_group([0, 1])
    if rank > 1:
        return {}
    ddp, optimizer, handle = job(group)
    dcp.load({"gradwire": handle.stateful}, checkpoint_id=Path(folder), process_group=group)
    after = total(handle.gather_state_dict()["states"])
    found = {
        "deviation": max((after[name] - values).abs().max().item() for name, values in before.items()),
        "size": max(values.abs().max().item() for values in before.values()),
        "names": [sorted(before), sorted(after)],
        "hash": train(ddp, optimizer, rank, 2, 0, STEPS),
    }
    handle.detach()
    return found


def total(states: list[Any]) -> dict[str, torch.Tensor]:
    """By parameter, the sum of what states hold in both roles."""
    sizes = {name: parameter.numel() for name, parameter in model().named_parameters()}
    totals: dict[str, torch.Tensor] = {}
    for state, role in itertools.product(states, ("local", "aggregate")):
        for name, pieces in state["residuals"][role].items():
            sums = totals.setdefault(name, torch.zeros(sizes[name], dtype=torch.float64))
            for offset, values in pieces.items():
                sums[int(offset) : int(offset) + values.numel()] += values
    return totals


def late(rank: int, world_size: int) -> list[str]:
    """Rank 0 comes later than the timeout of a message, as when it has written a checkpoint before."""
    ddp, optimizer, handle = job(timeout=timedelta(seconds=2))
    train(ddp, optimizer, rank, world_size, 0, 1)
    if rank == 0:
        time.sleep(4)
    found = sorted(handle.gather_state_dict())
    handle.detach()
    return found


def absent(rank: int, world_size: int) -> str:
    """Rank 1 does not gather."""
    ddp, optimizer, handle = job(timeout=timedelta(seconds=2), stall_timeout=timedelta(seconds=2))
    train(ddp, optimizer, rank, world_size, 0, 1)
    said = ""
    if rank == 0:
        try:
            handle.gather_state_dict()
        except gw.errors.SyncError as error:
            said = f"{error.phase}: {error}"
        dist.distributed_c10d._get_default_store().set("done", "1")
    dist.distributed_c10d._get_default_store().wait(["done"], timedelta(seconds=60))
    return said
