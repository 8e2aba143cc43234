"""A job of several nodes, as torchrun starts them: hierarchical synchronization, traced."""

from __future__ import annotations

import itertools
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import gradwire as gw
from tests.integration.jobs.training import batches, fingerprint, loss_of, model, wrap


def main() -> None:
    """One rank under torchrun: its folder as argument, its result as a file there."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
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
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
