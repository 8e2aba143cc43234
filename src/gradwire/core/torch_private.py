"""Everything gradwire uses of torch that torch does not promise, in one place.

Each function has a test that fails where a torch version changes what it relies on.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch.nn.parallel import DistributedDataParallel

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def in_backward() -> bool:
    """Whether the calling thread runs a backward (False in the hook of a rank that has joined early)."""
    return bool(torch._C._current_graph_task_id() != -1)


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward has ended, before the DDP reducer's own end; it may raise."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a communication hook is registered (by anybody); there is one slot and no way to empty it.

    DDP's own list of hooks lacks the built-in ones, and a copy of a module has the list but not the hooks.
    """
    return bool(ddp._get_ddp_logging_data().get("comm_hook"))  # type: ignore[no-untyped-call]


def register_hook(ddp: DistributedDataParallel, hook: Hook) -> None:
    """Register a communication hook that stays out of copies and pickles of the module.

    DDP keeps hooks in a list as well, for its Python reducer alone. In a copy they would never be called.
    """
    ddp.register_comm_hook(None, hook)
    ddp._comm_hooks.pop()


def has_mixed_precision(ddp: DistributedDataParallel) -> bool:
    """Whether DDP's own ``mixed_precision=`` is on, which takes the communication hook."""
    return getattr(ddp, "mixed_precision", None) is not None


def steps_in_backward(ddp: DistributedDataParallel) -> bool:
    """Whether parameters have optimizers that step within backward: DDP's next forward takes the hook for them."""
    return any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp._module_parameters)


def is_replicated(module: object) -> bool:
    """Whether `replicate` was called on a module: its DDP module has other parameter names, and comes later."""
    from torch.distributed._composable.replicate import DDP

    return isinstance(module, DDP)


def has_python_reducer(ddp: DistributedDataParallel) -> bool:
    """Whether hooks get single gradients, not buckets (``torch._dynamo.config.optimize_ddp = "python_reducer"``)."""
    return bool(getattr(ddp, "_use_python_reducer", False))


def divides_by_active_ranks(ddp: DistributedDataParallel) -> bool:
    """Whether `ddp` is within ``join(divide_by_initial_world_size=False)``."""
    return bool(ddp._join_config.enable and not getattr(ddp, "_divide_by_initial_world_size", True))


def waits_before_callbacks(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer may take the hooks' results before `after_backward` runs.

    It does in a static graph's first backward. Buckets are rebuilt in the third forward at the latest, so this is also
    True in the second, where it does no harm.
    """
    return bool(ddp.static_graph and not ddp._has_rebuilt_buckets)


def may_skip_parameters(ddp: DistributedDataParallel) -> bool:
    """Whether a backward may leave parameters out, whose buckets hold what their ``.grad`` held before."""
    return bool(ddp.find_unused_parameters or ddp.static_graph)


def parameter_names(ddp: DistributedDataParallel) -> dict[int, str]:
    """The names that all parameters have in the model before it was compiled, by their ids."""
    return {id(parameter): uncompiled_name(name) for name, parameter in ddp.module.named_parameters()}


def trained_parameters(ddp: DistributedDataParallel, *, sparse: bool = False) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters with dense gradients that DDP would synchronize if it were made now, by name, in its order.

    It was made with those that were not frozen then: which these are, it does not tell.

    Args:
        sparse: return those whose gradients are sparse instead.
    """
    names = parameter_names(ddp)
    found, are_sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    return [(names[id(each)], each) for each, is_sparse in zip(found, are_sparse) if is_sparse == sparse]


def uncompiled(module: object) -> object:
    """The module that `torch.compile` has wrapped; any other module is returned as it is."""
    return getattr(module, "_orig_mod", module)


def uncompiled_name(name: str) -> str:
    """A parameter's name without what `torch.compile` puts into it."""
    return name.replace("_orig_mod.", "")


def bucket_parameters(bucket: GradBucket) -> list[torch.Tensor]:
    """The parameters of a bucket, in the order of its gradients."""
    return list(bucket.parameters())


def is_sparse(bucket: GradBucket) -> bool:
    """Whether a bucket is the sparse gradient of one parameter: then it has no `gradients()`."""
    return bucket.buffer().is_sparse


def bucket_gradient(bucket: GradBucket, parameters: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    """One gradient of a bucket, without those of all others, which `bucket.gradients()` makes anew each time."""
    offset = sum(each.numel() for each in parameters[:index])
    return bucket.buffer()[offset : offset + parameters[index].numel()].view(parameters[index].shape)


def in_bucket_order(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """What is shaped like a parameter, flat, in the order in which buckets have its gradient.

    That is the parameter's order in memory where it is dense, as `torch.channels_last` is; else that of its dimensions.
    """
    if parameter.is_contiguous():
        return values.reshape(-1)
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return (values.permute(order) if parameter.permute(order).is_contiguous() else values).reshape(-1)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedules that a step of `optimizer` has been made, here elsewhere: else they warn of a wrong order."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def stepping_scaler() -> torch.amp.GradScaler | None:
    """The enabled GradScaler whose `step` the caller runs within, as hooks of an optimizer do; None without one."""
    frames = islice(
        traceback.walk_stack(sys._getframe()), 32
    )  # wrappers of the optimizer's `step` lie between, as schedulers' do
    for frame, _ in frames:
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            scaler: torch.amp.GradScaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
    return None
