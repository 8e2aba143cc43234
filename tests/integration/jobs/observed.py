"""Jobs that look at themselves."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

import gradwire as gw
from gradwire.core.errors import SyncError
from tests.integration.jobs.training import batches, loss_of, model, wrap


def train(ddp: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int, steps: int) -> None:
    for batch in itertools.islice(batches(rank, world_size), steps):
        optimizer.zero_grad()
        loss_of(ddp, batch).backward()
        optimizer.step()


def logs(rank: int, world_size: int, folder: str, method: str, steps: int) -> dict[str, Any]:
    """Train in a block, with logs of rank 0 and of all ranks. Rank 0's function fails halfway."""
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    seen: list[dict[str, float]] = []

    def fails(scalars: dict[str, float], step: int) -> None:
        if step > steps // 2:
            raise ConnectionError("the tracker is away")

    plan = gw.Plan(method, min_elements=0)
    with gw.attach(ddp, plan, optimizer=optimizer) as handle:
        handle.log_to(f"{folder}/all.csv", every=5, all_ranks=True)
        handle.log_to(lambda scalars, step: seen.append(scalars), every=5)
        handle.log_to(fails, every=1)
        train(ddp, optimizer, rank, world_size, steps)
        report = handle.report()
    return {"seen": seen, "sent": report.total.sent_bytes, "wait": report.wait_seconds, "steps": report.steps}


def raises_in_a_block(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1's loop raises in the block; the others learn it at once, as by an error that names it."""
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    started = time.monotonic()
    try:
        with gw.attach(ddp, gw.Plan("threelc", min_elements=0), optimizer=optimizer) as handle:
            train(ddp, optimizer, rank, world_size, 3)
            if rank == 1:
                raise ZeroDivisionError("a bad batch")
            train(ddp, optimizer, rank, world_size, 3)
    except (ZeroDivisionError, SyncError) as error:
        blamed = getattr(error, "rank", None)
        return {"error": [type(error).__name__, blamed], "seconds": time.monotonic() - started, "handle": repr(handle)}
    return {}
