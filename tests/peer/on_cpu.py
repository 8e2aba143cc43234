"""Lets torch's tests of DDP for GPUs run on CPU.

Most of them ask for GPUs although what they test is the same on CPU. Here a GPU is another name for the CPU: `cuda()`
and devices given as a number or as ``"cuda"`` mean the CPU, and `torch.cuda` still says that there is none. A test that
needs more than that fails at the baseline, and `differences.py` says so.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode


class CudaIsCpu(TorchFunctionMode):
    """Within it, tensors are made on, and moved to, the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *map(on_cpu, args[1:]))
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = kwargs | {"device": on_cpu(kwargs["device"])}
        return function(*args, **kwargs)


def on_cpu(device: Any) -> Any:
    """The CPU in place of a GPU. Everything that is no GPU stays as it is."""
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    return "cpu" if isinstance(device, str | torch.device) and str(device).startswith("cuda") else device


def install() -> None:
    """Replace what asks for GPUs, before torch's tests are imported, in this process and its forks."""
    common = importlib.import_module("torch.testing._internal.common_distributed")
    common.skip_if_lt_x_gpu = lambda *args, **kwargs: lambda test: test
    common.skip_if_no_gpu = lambda test: test
    common.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: 0
    move, create = torch.nn.Module.to, DistributedDataParallel.__init__

    def move_to_cpu(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return move(self, *map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})

    def create_on_cpu(self: DistributedDataParallel, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device_ids", "output_device")}
        create(self, module, *args, **kwargs)

    torch.nn.Module.to = move_to_cpu
    DistributedDataParallel.__init__ = create_on_cpu
