"""Everything gradwire uses of torch that torch does not promise, in one place.

Each function has a test that fails where a torch version changes what it relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch.nn.parallel import DistributedDataParallel


def in_backward() -> bool:
    """Whether the calling thread runs a backward (False in the hook of a rank that has joined early)."""
    return bool(torch._C._current_graph_task_id() != -1)


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward has ended, before the DDP reducer's own end; it may raise."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a communication hook is registered (by anybody); there is one slot and no way to empty it."""
    return bool(getattr(ddp, "_comm_hooks", None))


def has_mixed_precision(ddp: DistributedDataParallel) -> bool:
    """Whether DDP's own ``mixed_precision=`` is on, which takes the communication hook."""
    return getattr(ddp, "mixed_precision", None) is not None


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


def trained_parameters(ddp: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that DDP synchronises, in its order, by their names in the model before it was compiled."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    return [
        (uncompiled_name(name), parameter)
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def uncompiled(module: object) -> object:
    """The module that `torch.compile` has wrapped; any other module is returned as it is."""
    return getattr(module, "_orig_mod", module)


def uncompiled_name(name: str) -> str:
    """A parameter's name without what `torch.compile` puts into it."""
    return name.replace("_orig_mod.", "")


def bucket_parameters(bucket: GradBucket) -> list[torch.Tensor]:
    """The parameters of a bucket, in the order of its gradients."""
    return list(bucket.parameters())


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
