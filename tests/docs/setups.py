"""The rest of the scripts that Python blocks of the pages are part of.

A set-up is a context manager whose value is the namespace of the block. Those in `ON_TWO_RANKS` run in a job of two
ranks, those in `ALONE` in one process. ``replaced`` in a namespace maps text of the page, such as addresses, to what
stands for it here.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.tuning.candidates import Candidate

Namespace = dict[str, Any]


class Model(nn.Module):
    """A model with an embedding, matrices and biases, large enough that some of it is compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 8)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        return self.head(torch.relu(self.body(self.embed(numbers).flatten(1))))


class Metrics:
    """A user's own metrics."""

    def note(self, tensor: torch.Tensor) -> None:
        """Take one."""
        self.last = float(tensor.norm())


def renew(names: Namespace, seed: int = 0) -> None:
    """A fresh module with its optimizer, in DDP if there are ranks."""
    torch.manual_seed(seed)
    model: nn.Module = Model()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    batches = [
        (torch.randint(64, (16, 2), generator=generator), torch.randint(8, (16,), generator=generator))
        for _ in range(4)
    ]
    loss_function = nn.functional.cross_entropy

    def train(batch: Any = None) -> None:
        inputs, labels = batch or batches[0]
        names["optimizer"].zero_grad()
        loss_function(model(inputs), labels).backward()
        names["optimizer"].step()

    class SummaryWriter:
        """What `log_to` asks of TensorBoard's."""

        def __init__(self) -> None:
            self.scalars: dict[str, float] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars[name] = value

    names |= {
        "SummaryWriter": SummaryWriter, "dcp": torch.distributed.checkpoint, "folder": "checkpoint", "step": 2,
        "my_newest_step": 2, "old_world_size": 2, "my_metrics": Metrics(), "model_state": model.state_dict(),
        "torch": torch, "dist": dist, "nn": nn, "os": os, "itertools": itertools, "gw": gw, "rank": rank,
        "ddp": model, "model": model, "optimizer": optimizer, "opt": optimizer, "batches": batches,
        "loss_function": loss_function, "train": train,
    }  # fmt: skip


def finish(names: Namespace) -> None:
    """What every script goes on to do: two steps, after which replicas are equal. Detaches."""
    for batch in names["batches"][:2]:
        names["train"](batch)
    mine = torch.cat([parameter.detach().flatten() for parameter in names["ddp"].parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first), "replicas differ"
    if "handle" in names:
        names.pop("handle").detach()


@contextmanager
def ddp() -> Iterator[Namespace]:
    """A DDP module that is not attached yet."""
    names: Namespace = {}
    renew(names)
    yield names
    finish(names)


@contextmanager
def attached() -> Iterator[Namespace]:
    """An attached module, after two steps."""
    with ddp() as names:
        names["handle"] = gw.attach(names["ddp"], "threelc", optimizer=names["optimizer"])
        for batch in names["batches"][:2]:
            names["train"](batch)
        yield names


@contextmanager
def decided() -> Iterator[Namespace]:
    """A module under auto that has chosen a plan."""
    with ddp() as names:
        handle = gw.attach(names["ddp"], "auto", optimizer=names["optimizer"], fidelity="exact")
        names["handle"] = handle
        for step in range(1000):
            names["train"](names["batches"][step % 4])
            if handle.autopilot.decisions:
                break
        # Here DDP's own all-reduce may be as fast as the plan, or not; the plan is what there is to save.
        handle.autopilot.current = Candidate.of(handle.autopilot.decisions[-1].table)
        yield names


@contextmanager
def planned() -> Iterator[Namespace]:
    """A DDP module, and plan.json for it."""
    from gradwire.planner import PlannedTensor, plan
    from gradwire.planner.fidelity import FEW_ENCODES, RankedCompressor
    from tests.planner.machines import codecs, costs

    with ddp() as names:
        tensors = [
            PlannedTensor(name, tuple(parameter.shape)) for name, parameter in names["ddp"].module.named_parameters()
        ]
        slow = costs(world_size=2, rate=1e5, codecs=codecs() | {"onebit": codecs()["bit"]})
        table = plan(tensors, slow, [RankedCompressor("onebit", FEW_ENCODES)])
        assert table.compresses
        if names["rank"] == 0:
            table.pin().save("plan.json")
        dist.barrier()
        yield names


@contextmanager
def planning() -> Iterator[Namespace]:
    """A model, and measured costs for 4 ranks at 1 Gb/s."""
    from gradwire.planner.costs import LinkCosts
    from gradwire.planner.fidelity import methods
    from gradwire.simulate.machine import machine_costs

    names: Namespace = {}
    renew(names)
    measured = machine_costs([method.spec for method in methods("balanced")])
    names["costs"] = replace(measured, world_size=4, links=(LinkCosts(1e-4, 8e-9),))
    yield names
    assert Path("plan.json").stat().st_size > 0


@contextmanager
def aggregators(*shown: str) -> Iterator[Namespace]:
    """A DDP module, and aggregation servers at these addresses for each time that it is attached."""
    with ddp() as names:
        servers: list[subprocess.Popen[str]] = []
        # A server starts again at the port of the one before, which the kernel must not have handed out in between.
        port = 10_000 + os.getpid() % 20_000
        addresses = [f"127.0.0.1:{port + index}" for index in range(len(shown))]

        def serve() -> None:
            while servers:  # those before end with the job that they have served
                assert servers.pop().wait(60) == 0
            if names["rank"] == 0:
                addresses[:] = [_serve(servers, "--aggregate", "2", each.rpartition(":")[2]) for each in addresses]
            dist.broadcast_object_list(addresses)
            names["replaced"] = dict(zip(shown, addresses, strict=True))

        names["before_attach"] = serve
        yield names
    for server in servers:
        assert server.wait(60) == 0


@contextmanager
def parameter_server() -> Iterator[Namespace]:
    """A plain loop, and a parameter server with one worker."""
    names: Namespace = {}
    renew(names)
    servers: list[subprocess.Popen[str]] = []
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    names |= {"data": names["batches"], "build": lambda: copy.deepcopy(names["model"])}
    names["replaced"] = {"127.0.0.1:7070": _serve(servers, "--parameters", "1")}
    yield names
    names["client"].close()
    assert servers[0].wait(60) == 0


@contextmanager
def parameter_client() -> Iterator[Namespace]:
    """A plain loop whose client is connected."""
    with parameter_server() as names:
        address = names.pop("replaced")["127.0.0.1:7070"]
        names["client"] = gw.ParameterClient(names["model"], names["optimizer"], address, compressor="threelc")
        yield names


def _serve(servers: list[subprocess.Popen[str]], kind: str, workers: str, port: str = "0") -> str:
    """Start a server. Returns its address."""
    command = [sys.executable, "-m", "gradwire.cli", "serve", kind, "--workers", workers, "--port", port]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    servers.append(server)
    assert server.stdout is not None
    found = re.search(r" at (\S+:\d+)$", server.stdout.readline())
    assert found is not None
    return found[1]


@contextmanager
def accelerator() -> Iterator[Namespace]:
    """What Accelerate takes, in one process."""
    from accelerate import Accelerator

    names: Namespace = {}
    renew(names)
    import gradwire.trainers  # noqa: F401

    data = torch.utils.data.TensorDataset(*(torch.cat(each) for each in zip(*names["batches"], strict=True)))
    names |= {"accelerator": Accelerator(cpu=True), "batches": torch.utils.data.DataLoader(data, batch_size=16)}
    yield names
    assert names["handle"].state_dict() is not None


@contextmanager
def trainer() -> Iterator[Namespace]:
    """What Transformers' Trainer takes, in one process."""
    from transformers import Trainer, TrainingArguments

    class Scored(Model):
        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": nn.functional.cross_entropy(super().forward(inputs), labels)}

    names: Namespace = {}
    renew(names)
    args = TrainingArguments(output_dir="out", max_steps=2, use_cpu=True, report_to="none", save_strategy="no")
    samples = [{"inputs": inputs, "labels": label} for inputs, label in zip(*names["batches"][0], strict=True)]
    names |= {"Trainer": Trainer, "args": args, "model": Scored(), "samples": samples}
    yield names
    assert names["trainer"].state.global_step == 2


@contextmanager
def lightning() -> Iterator[Namespace]:
    """Lightning's Trainer."""
    from lightning import Trainer

    yield {"Trainer": Trainer}


Setup = Callable[[], AbstractContextManager[Namespace]]
ON_TWO_RANKS: dict[str, Setup] = {
    "ddp": ddp, "attached": attached, "decided": decided, "planned": planned,
    "aggregator": partial(aggregators, "10.0.0.9:7071"),
    "aggregators": partial(aggregators, "10.0.0.9:7071", "10.0.0.10:7071"),
}  # fmt: skip
ALONE: dict[str, Setup] = {
    "planning": planning, "parameter_server": parameter_server, "parameter_client": parameter_client,
    "accelerator": accelerator, "trainer": trainer, "lightning": lightning,
}  # fmt: skip
SETUPS = ON_TWO_RANKS | ALONE
