"""Parameter servers and workers for processes of their own; see `tests.server_processes.Process`."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import gradwire as gw
from gradwire.core.errors import GradwireError
from gradwire.parameter_server.process import ParameterServer, ParameterServerOptions
from tests.server_processes import run


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))


def batch(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(16, 48, generator=generator)
    return x, x[:, :5].argmax(1)


def serve(pipe: Any, workers: int, port: int, state: str | None, timeout: float, patience: float) -> None:
    try:
        options = ParameterServerOptions(
            workers, port=port, state=Path(state) if state else None, checkpoint_bytes=20_000,
            timeout=timedelta(seconds=timeout), patience=timedelta(seconds=patience),
        )  # fmt: skip
        run(pipe, ParameterServer(options))
    except BaseException as error:
        pipe.send(("failed", repr(error)))
        raise


def work(
    pipe: Any,
    worker: int,
    workers: int,
    servers: str,
    steps: int,
    timeout: float = 30.0,
    backups: int = 0,
    staleness: int = 0,
) -> None:
    """Train up to this step of the job. Says "step" after each, so that the test can hold it up."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
    try:
        client = gw.ParameterClient(
            model, optimizer, servers,
            job=gw.JobOptions(worker=worker, workers=workers, backups=backups, staleness=staleness),
            transfer=gw.TransferOptions(min_elements=64),
            connection=gw.ConnectionOptions(timeout=timedelta(seconds=timeout)),
        )  # fmt: skip
        while client.steps < steps:
            x, y = batch(worker, client.steps)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            client.step()
            schedule.last_epoch = client.steps - 1
            schedule.step()
            pipe.send(("step", client.steps))
        client.close()
        pipe.send(("weights", {name: value.numpy() for name, value in model.state_dict().items()}))
    except GradwireError as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
    except BaseException as error:
        pipe.send(("failed", repr(error)))
        raise
