"""Everything gradwire uses of torch that torch does not promise, in one place.

Each function has a test that fails where a torch version changes what it relies on.
"""

from __future__ import annotations

from collections.abc import Callable

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


def bucket_parameters(bucket: GradBucket) -> list[torch.Tensor]:
    """The parameters of a bucket, in the order of its gradients."""
    return list(bucket.parameters())
