"""What to do with a module that is not DDP's: advice by what has wrapped it, or whose it is."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_SHARDED = (
    "This module is sharded by FSDP, which reduces gradients by itself; gradwire attaches to DDP only. Where each rank "
    "can hold the model, use DistributedDataParallel in place of FSDP, with ZeroRedundancyOptimizer to shard the "
    "optimizer's state. Else shard within each node only, and average the gradients' shards between nodes by "
    "gradwire.Synchronizer."
)
# By the name of a class and of its package, so that none of these is imported.
_ADVICE = {
    ("torch", "FullyShardedDataParallel"): _SHARDED,
    ("torch", "FSDPModule"): _SHARDED,
    ("torch", "DataParallel"): (
        "DataParallel copies the model within one process, between whose threads there is no network. Run a process "
        "for each GPU with torchrun, wrap the model in DistributedDataParallel, and attach to that."
    ),
    ("deepspeed", "DeepSpeedEngine"): (
        "DeepSpeed's engine averages gradients by itself; gradwire attaches to DDP only. Where each rank can hold the "
        "model, train with DistributedDataParallel in place of the engine."
    ),
    ("lightning", "LightningModule"): (
        "Lightning wraps its module when training starts. Attach in on_train_start, to trainer.strategy.model, with "
        'optimizer=trainer.optimizers and strategy="ddp" of the Trainer.'
    ),
}
_ADVICE["pytorch_lightning", "LightningModule"] = _ADVICE["lightning", "LightningModule"]


def advice_on(module: object) -> str:
    """What somebody may do who wants to attach to `module`, which is not a DDP module."""
    if not isinstance(module, nn.Module):
        return f"gradwire attaches to a DistributedDataParallel module, but this is of type {type(module).__name__}."
    for each in module.modules():  # `fully_shard` may have been called on the layers alone
        for kind in type(each).__mro__:
            known = _ADVICE.get((kind.__module__.partition(".")[0], kind.__name__))
            if known is not None:
                return known
    for path, each in module.named_modules():
        if isinstance(each, DistributedDataParallel):
            return f"This {type(module).__name__} is not a DDP module, but has one. Attach to that: its {path!r}."
    return (
        f"This {type(module).__name__} is not wrapped in DDP. Wrap it first, ddp = DistributedDataParallel(model), and "
        "attach to ddp; also in place of Horovod, whose optimizer averages gradients by itself."
    )
