"""Jobs of several nodes, as torchrun starts them: hierarchical synchronization, traced, and what `auto` plans."""

from __future__ import annotations

import itertools
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from tests.integration.jobs.training import batches, fingerprint, loss_of, model, wrap


def main() -> None:
    """One rank under torchrun: the job and its folder as arguments, its result as a file there."""
    job, folder = {"trains": trains, "decides": decides}[sys.argv[1]], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(job(folder)))
    dist.destroy_process_group()


def trains(folder: Path) -> dict[str, Any]:
    """40 steps by `hierarchical`, with a trace."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    handle = gw.attach(ddp, gw.Plan("onebit", strategy="hierarchical", min_elements=0), optimizer=optimizer)
    losses = []
    with handle.trace(folder / "trace.json"):
        for batch in itertools.islice(batches(rank, world_size), 40):
            optimizer.zero_grad()
            loss = loss_of(ddp, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    report = handle.report()
    result = {
        "node": os.environ["GROUP_RANK"],
        "methods": sorted({row.method for row in report.tensors.values()}),
        "sent_bytes": report.total.sent_bytes,
        "hash": fingerprint(ddp.parameters()),
        "losses": losses,
    }
    handle.detach()
    return result


def decides(folder: Path) -> dict[str, Any]:
    """Until `auto` has decided, with gradients without structure, of which no compressor sends little."""
    torch.manual_seed(0)
    ddp = wrap(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)))
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-3)
    handle = gw.attach(ddp, "auto", optimizer=optimizer)
    pilot = handle.autopilot
    assert pilot is not None
    while not pilot.decisions:
        optimizer.zero_grad()
        (ddp(torch.randn(16, 512)) * torch.randn(16, 512)).sum().backward()
        optimizer.step()
    decision = pilot.decisions[0]
    result = {
        "ranks_per_node": decision.costs.ranks_per_node,
        "planned": sorted({(row.spec, row.strategy) for row in decision.table.rows}),
        "chosen": pilot.current.name,
        "hash": fingerprint(ddp.parameters()),
    }
    dist.barrier()  # rank 0 has the store
    handle.detach()
    return result


if __name__ == "__main__":
    main()
