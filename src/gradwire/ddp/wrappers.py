"""Advice for users who attach to a module that is not a DDP module, by its wrapper or framework."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_SHARDED = (
    "This module is sharded by FSDP, which reduces gradients itself, and gradwire attaches to DDP only. If each rank "
    "can hold the model, use DistributedDataParallel instead, with ZeroRedundancyOptimizer to shard the optimizer's "
    "state. If not, shard within each node only, and average gradient shards between nodes with gradwire.Synchronizer."
)
# By the name of a class and of its package, so that none of these is imported.
_ADVICE = {
    ("torch", "FullyShardedDataParallel"): _SHARDED,
    ("torch", "FSDPModule"): _SHARDED,
    ("torch", "DataParallel"): (
        "DataParallel copies the model within one process, so there is no network between the copies. Run one process "
        "per GPU with torchrun, wrap the model in DistributedDataParallel, and attach to that."
    ),
    ("deepspeed", "DeepSpeedEngine"): (
        "DeepSpeed's engine averages gradients itself, and gradwire attaches to DDP only. If each rank can hold the "
        "model, train with DistributedDataParallel instead of the engine."
    ),
    ("lightning", "LightningModule"): (
        'Lightning wraps its module when training starts. Use strategy="ddp" of the Trainer, and attach to '
        "trainer.strategy.model in on_train_start, with optimizer=trainer.optimizers."
    ),
}
_ADVICE["pytorch_lightning", "LightningModule"] = _ADVICE["lightning", "LightningModule"]


def advice_on(module: object) -> str:
    """Advice for attaching to `module`, which is not a DDP module."""
    if not isinstance(module, nn.Module):
        return f"gradwire attaches to a DistributedDataParallel module, but this is of type {type(module).__name__}."
    for each in module.modules():  # `fully_shard` may have been called on single layers only
        for kind in type(each).__mro__:
            known = _ADVICE.get((kind.__module__.partition(".")[0], kind.__name__))
            if known is not None:
                return known
    for path, each in module.named_modules():
        if isinstance(each, DistributedDataParallel):
            return f"This {type(module).__name__} is not a DDP module, but its {path!r} is one. Attach to that."
    return (
        f"This {type(module).__name__} is not wrapped in DDP. Wrap it first, ddp = DistributedDataParallel(model), and "
        "attach to ddp. If you use Horovod, whose optimizer averages gradients itself, replace it by DDP."
    )
