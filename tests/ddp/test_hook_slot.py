"""The hook slot of a module: what its copies have, and whom `attach` refuses because the slot is taken."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import gradwire as gw
from gradwire.core.errors import AttachError


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))


def backward(ddp: nn.Module) -> None:
    ddp(torch.arange(20.0).view(5, 4)).square().sum().backward()


def through_a_file(ddp: DistributedDataParallel) -> nn.Module:
    file = io.BytesIO()
    torch.save(ddp, file)
    assert b"gradwire" not in file.getvalue(), "it loads where gradwire is not installed"
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file, lambda ddp: AveragedModel(ddp).module])
@pytest.mark.parametrize("attached", [True, False])
def test_copies_of_a_module_are_plain_and_can_be_attached(
    copied: Callable[[DistributedDataParallel], nn.Module], attached: bool
) -> None:
    ddp = wrapped()
    handle = gw.attach(ddp, "threelc")
    backward(ddp)
    if not attached:
        handle.detach()
    twin = copied(ddp)
    backward(twin)
    assert handle.report().steps == 1, "the copy's backwards are not the handle's"
    own = gw.attach(twin, "threelc")  # type: ignore[arg-type]
    backward(twin)
    assert own.report().steps == 1
    if attached:
        backward(ddp)
        assert handle.report().steps == 2
    own.detach()
    handle.detach()


def test_a_built_in_hook_takes_the_slot_too() -> None:
    ddp = wrapped()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(AttachError, match="Create the DDP module without that hook and attach gradwire in its place"):
        gw.attach(ddp, "threelc")


def test_optimizers_that_step_within_backward_are_refused() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    ddp = wrapped()
    _apply_optimizer_in_backward(torch.optim.SGD, ddp.module.parameters(), {"lr": 0.1})
    with pytest.raises(AttachError, match="Use an optimizer that steps after backward"):
        gw.attach(ddp, "threelc")


def test_of_a_replicated_module_the_ddp_module_behind_it_is_attached() -> None:
    from torch.distributed._composable.replicate import replicate

    module = replicate(nn.Linear(4, 2))
    with pytest.raises(
        AttachError, match=r"Run a forward pass, then attach to .* gradwire.attach\(replicate.state\(module\)"
    ):
        gw.attach(module, "threelc")  # type: ignore[arg-type]
    backward(module)
    handle = gw.attach(replicate.state(module)._ddp, "threelc")
    backward(module)
    assert handle.report().steps == 1
    handle.detach()


def test_complex_parameters_are_refused_by_name() -> None:
    module = nn.Linear(4, 2)
    module.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(AttachError, match=r"'phase' is torch.complex64.* call torch.view_as_complex in forward"):
        gw.attach(DistributedDataParallel(module), "threelc")
