"""Modules that are not DDP's get the advice that fits what they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.core.errors import AttachError


def fsdp1() -> nn.Module:
    """One that nobody has wrapped: the constructor wants an accelerator."""
    module = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(module)
    module._fsdp_wrapped_module = nn.Linear(2, 2)
    return module


def fsdp2() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    return model


def of_library(package: str, name: str) -> nn.Module:
    """What the library's class is to us, which is not installed here."""
    return type("Users", (type(name, (nn.Module,), {"__module__": f"{package}.somewhere"}),), {})()


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = DistributedDataParallel(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (fsdp1, "sharded by FSDP.*use DistributedDataParallel instead.*gradwire.Synchronizer"),
        (fsdp2, "sharded by FSDP.*use DistributedDataParallel instead.*gradwire.Synchronizer"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "within one process.*torchrun"),
        (lambda: of_library("deepspeed", "DeepSpeedEngine"), "instead of the engine"),
        (lambda: of_library("lightning", "LightningModule"), "trainer.strategy.model"),
        (lambda: of_library("pytorch_lightning", "LightningModule"), "trainer.strategy.model"),
        (Holder, "its 'inner' is one. Attach to that"),
        (lambda: nn.Linear(2, 2), r"This Linear is not wrapped in DDP. Wrap it first, ddp = .*Horovod"),
        (lambda: torch.ones(3), "but this is of type Tensor"),
    ],
)
def test_what_is_not_ddp_gets_advice(make, advice: str) -> None:
    with pytest.raises(AttachError, match=advice):
        gw.attach(make(), "threelc")
