"""Jobs that train through a stand-alone aggregator, which somebody else starts, kills and starts again."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import gradwire as gw
from tests.integration.jobs.training import batches, fingerprint, loss_of, model, wrap

TIMEOUT = 3.0  # seconds


def train(rank: int, world_size: int, server: str, folder: str, steps: int = 20) -> dict[str, Any]:
    """The same training between ranks and through the server; during the second the server is restarted."""

    def run(note: bool, strategy: str, options: gw.SyncOptions) -> tuple[list[str], dict[str, Any]]:
        ddp, weights = wrap(model()), []
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        handle = gw.attach(ddp, gw.Plan("thc", strategy=strategy, min_elements=0), optimizer=optimizer, options=options)
        for step, batch in enumerate(itertools.islice(batches(rank, world_size), steps)):
            if note and step == 5 and rank == 0:
                (Path(folder) / "under-way").touch()
            if note and step == steps - 3:
                _await(Path(folder) / "restarted")
            ddp.zero_grad()
            loss_of(ddp, batch).backward()
            optimizer.step()
            weights.append(fingerprint(ddp.parameters()))
        report = handle.report().as_dict()["tensors"]
        handle.detach()
        return weights, report

    between, _ = run(False, "scatter_reduce", gw.SyncOptions())
    through, report = run(True, "server", gw.SyncOptions(timedelta(seconds=30), server=server))
    return {"between": between, "through": through, "report": report["2.weight"]}


def lose_the_server(rank: int, world_size: int, server: str, folder: str) -> dict[str, Any]:
    """Trains until the server is gone."""
    ddp = wrap(model())
    limit = timedelta(seconds=TIMEOUT)
    handle = gw.attach(
        ddp,
        gw.Plan("thc", strategy="server", min_elements=0),
        options=gw.SyncOptions(timeout=limit, server=server),
        check_every=0,
    )
    for step, batch in enumerate(batches(rank, world_size)):
        if step == 5 and rank == 0:
            (Path(folder) / "under-way").touch()
        ddp.zero_grad()
        start = time.monotonic()
        try:
            loss_of(ddp, batch).backward()
        except gw.errors.SyncError as error:
            seconds = time.monotonic() - start
            handle.detach()
            return {"type": type(error).__name__, "message": str(error), "seconds": seconds, "step": step}
    raise AssertionError("unreachable")


def _await(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.01)
