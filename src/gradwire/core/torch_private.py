"""All uses of private or undocumented parts of torch.

Each function has a test that fails if a torch version changes what the function relies on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def group_store(group: dist.ProcessGroup) -> Store:
    """Return the store of a process group."""
    return dist.distributed_c10d._get_process_group_store(group)


def in_backward() -> bool:
    """Whether the calling thread runs a backward pass. False in the hook of a rank that has joined early."""
    return bool(torch._C._current_graph_task_id() != -1)


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback`, which may raise, at the end of the current backward pass, before the DDP reducer finishes."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether any communication hook is registered. There is one slot, and no way to empty it.

    DDP's own list of hooks lacks the built-in hooks, and a copy of a module has the list but not the hooks.
    """
    return bool(ddp._get_ddp_logging_data().get("comm_hook"))  # type: ignore[no-untyped-call]


def register_hook(ddp: DistributedDataParallel, hook: Hook) -> None:
    """Register a communication hook that is not part of copies and pickles of the module.

    DDP also keeps hooks in a list, only for its Python reducer. In a copy they would never be called.
    """
    ddp.register_comm_hook(None, hook)
    ddp._comm_hooks.pop()


def has_mixed_precision(ddp: DistributedDataParallel) -> bool:
    """Whether DDP uses the communication hook itself, for ``mixed_precision=``."""
    return getattr(ddp, "mixed_precision", None) is not None


def steps_in_backward(ddp: DistributedDataParallel) -> bool:
    """Whether optimizers step within the backward pass. DDP's next forward pass then takes the hook for them."""
    return any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp._module_parameters)


def is_replicated(module: object) -> bool:
    """Whether `replicate` was called on a module. Its DDP module is made later, with other parameter names."""
    from torch.distributed._composable.replicate import DDP

    return isinstance(module, DDP)


def has_python_reducer(ddp: DistributedDataParallel) -> bool:
    """Whether hooks get single gradients, not buckets (``torch._dynamo.config.optimize_ddp = "python_reducer"``)."""
    return bool(getattr(ddp, "_use_python_reducer", False))


def divides_by_active_ranks(ddp: DistributedDataParallel) -> bool:
    """Whether `ddp` is in a ``join(divide_by_initial_world_size=False)`` block."""
    return bool(ddp._join_config.enable and not getattr(ddp, "_divide_by_initial_world_size", True))


def waits_before_callbacks(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer may take the hooks' results before `after_backward` runs.

    It does so in the first backward pass of a static graph. This also returns True in the second, which does no harm:
    buckets are rebuilt in the third forward pass at the latest.
    """
    return bool(ddp.static_graph and not ddp._has_rebuilt_buckets)


def may_skip_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether a backward pass may skip buckets, the last one included (``skip_all_reduce_unused_params=``)."""
    return bool(getattr(ddp, "skip_all_reduce_unused_params", False))


def may_skip_parameters(ddp: DistributedDataParallel) -> bool:
    """Whether a backward pass may skip parameters. Buckets then contain their previous ``.grad``."""
    return bool(ddp.find_unused_parameters or ddp.static_graph)


def discards_means(ddp: DistributedDataParallel) -> bool:
    """Whether DDP leaves the ``.grad`` of parameters that no rank has used, without their means.

    It does where it copies gradients into buckets. Where they are views of buckets, they become the means.
    """
    return may_skip_parameters(ddp) and not ddp.gradient_as_bucket_view


def num_users(ddp: DistributedDataParallel) -> list[int]:
    """Return how many ranks have used each parameter that DDP synchronizes, in its order.

    Call it where `may_skip_parameters`, after DDP has taken the means of a backward pass.
    """
    counts: list[int] = ddp.reducer._get_local_used_map().tolist()
    return counts


def parameter_names(ddp: DistributedDataParallel) -> dict[int, str]:
    """Return the names of all parameters in the model before it was compiled, by id."""
    return {id(parameter): uncompiled_name(name) for name, parameter in ddp.module.named_parameters()}


def trained_parameters(ddp: DistributedDataParallel, *, sparse: bool = False) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters with dense gradients that DDP would synchronize if it were made now, in its order.

    DDP does not tell which parameters were frozen when it was made.

    Args:
        sparse: If true, return the parameters with sparse gradients instead.
    """
    names = parameter_names(ddp)
    found, are_sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    return [(names[id(each)], each) for each, is_sparse in zip(found, are_sparse) if is_sparse == sparse]


def learning_parameters(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Return the parameters that DDP does not ignore and that are not frozen now, in an order that all ranks share."""
    return [each for each in ddp._module_parameters if each.requires_grad]


def replicated_tensors(ddp: DistributedDataParallel) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    """Return all parameters and buffers that ranks are meant to hold in equal copies, frozen ones too."""
    ddp._assign_modules_buffers()  # type: ignore[no-untyped-call]  # some may have been replaced since
    return list(ddp._module_parameters), list(ddp.modules_buffers)


def uncompiled(module: object) -> object:
    """Return the module that `torch.compile` has wrapped, or `module` itself."""
    return getattr(module, "_orig_mod", module)


def uncompiled_name(name: str) -> str:
    """Return a parameter's name without the prefixes of `torch.compile`."""
    return name.replace("_orig_mod.", "")


def bucket_parameters(bucket: GradBucket) -> list[torch.Tensor]:
    """Return the parameters of a bucket, in the order of its gradients."""
    return list(bucket.parameters())


def bucket_memory(ddp: DistributedDataParallel, bucket: GradBucket) -> tuple[int, int, bool]:
    """Return what stays the same while a bucket has the same parameters in the same memory.

    DDP rebuilds its buckets once, after the first backward passes.
    """
    buffer = bucket.buffer()
    return buffer.data_ptr(), buffer.numel(), bool(ddp._has_rebuilt_buckets)


def is_sparse(bucket: GradBucket) -> bool:
    """Whether a bucket is the sparse gradient of one parameter, without `gradients()`."""
    return bucket.buffer().is_sparse


def bucket_gradient(bucket: GradBucket, parameters: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    """Return one gradient of a bucket. `bucket.gradients()` would create views of all of them at each call."""
    offset = sum(each.numel() for each in parameters[:index])
    return bucket.buffer()[offset : offset + parameters[index].numel()].view(parameters[index].shape)


def bucket_order(parameter: torch.Tensor) -> list[int]:
    """Return the dimensions of a parameter in the order of its gradient in buckets, slowest first.

    That is the parameter's memory order if it is dense, as `torch.channels_last` is, and otherwise that of its
    dimensions.
    """
    dims = list(range(parameter.dim()))
    order = dims if parameter.is_contiguous() else sorted(dims, key=parameter.stride, reverse=True)
    return order if parameter.permute(order).is_contiguous() else dims


def in_bucket_order(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Flatten values of a parameter's shape in the order of its gradient in buckets."""
    if parameter.is_contiguous():
        return values.reshape(-1)
    return values.permute(bucket_order(parameter)).reshape(-1)


def copy_all(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy tensors to others in one call. For small tensors, calls take longer than bytes."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that `optimizer` has stepped, although another process did it. Otherwise they warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def skips_within_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step that ends now has changed nothing, because gradients of a GradScaler were not finite.

    A GradScaler leaves that to optimizers that are fused, and calls them in any case.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(is_fused) and isinstance(found_inf, torch.Tensor) and bool((found_inf > 0).any())


def stepping_scaler() -> torch.amp.GradScaler | None:
    """Return the enabled GradScaler whose `step` is calling this, as optimizer hooks need; None if there is none."""
    code = torch.amp.GradScaler.step.__code__
    frame: FrameType | None = sys._getframe()
    for _ in range(32):  # `step` may be wrapped, as by schedulers
        if frame is None:
            break
        if frame.f_code is code:
            scaler: torch.amp.GradScaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
        frame = frame.f_back
    return None
