"""A small model, and its clients in this process."""

from __future__ import annotations

from typing import Any

import torch

import gradwire as gw
from gradwire.parameter_server.process import ParameterServer
from tests.parameter_server.processes import batch

ALONE = gw.JobOptions(worker=0, workers=1)


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(48, 5, bias=False)


def sgd(model: torch.nn.Module, momentum: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


def backward(model: torch.nn.Module, step: int) -> None:
    x, y = batch(0, step)
    torch.nn.functional.cross_entropy(model(x), y).backward()


def connect(
    server: ParameterServer, job: gw.JobOptions = ALONE, *, momentum: float = 0.0, **options: Any
) -> gw.ParameterClient:
    """Return a client with a model and an optimizer of its own."""
    model = linear()
    return gw.ParameterClient(model, sgd(model, momentum), f"127.0.0.1:{server.address[1]}", job=job, **options)


def train_step(client: gw.ParameterClient, step: int) -> bool:
    """Take a step, and return whether the job goes on."""
    backward(client.model, step)
    return client.step()
