"""The one communication hook slot of a DDP module, which torch gives out once and never takes back.

What `attach` registers there is a trampoline: it calls what is attached, and with nothing attached does exactly what
DDP does without a hook.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.errors import AttachError
from gradwire.integrations import torch_private

if TYPE_CHECKING:
    from gradwire.integrations.handle import Handle

_ATTRIBUTE = "_gradwire_slot"  # of a DDP module: its trampoline


class Slot:
    """The one communication hook of a DDP module: calls the attached handle, else does what DDP does natively.

    Attributes:
        handle: what is attached; None after `detach`.
        registered: whether the module's slot is ours; then for good.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.handle: Handle | None = None
        self.registered = False
        self._ddp = weakref.ref(ddp)
        self._group = ddp.process_group

    def register(self, ddp: DistributedDataParallel) -> None:
        """Take the module's hook slot, for good, if it has not been taken for this."""
        if not self.registered:
            # A lambda, because torch compares annotations as objects and ours are strings.
            ddp.register_comm_hook(None, lambda state, bucket: self(bucket))
            self.registered = True

    def __call__(self, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return self._native(bucket) if self.handle is None else self.handle.on_bucket(bucket)

    def _native(self, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        ddp = self._ddp()
        if ddp is not None and torch_private.divides_by_active_ranks(ddp):  # as DDP's own path does, but no hook's
            if bucket.index() == 0:
                self._active = torch.tensor([float(torch_private.in_backward())], device=ddp.device)
                dist.all_reduce(self._active, group=self._group)
            bucket.buffer().mul_(self._group.size() / self._active.item())
        return allreduce_hook(self._group, bucket)


def slot_of(ddp: DistributedDataParallel) -> Slot:
    """The module's trampoline; made on first use, and kept, since a hook cannot be unregistered."""
    slot = getattr(ddp, _ATTRIBUTE, None)
    if slot is None:
        slot = Slot(ddp)
        setattr(ddp, _ATTRIBUTE, slot)
    return slot


def check_attachable(ddp: object, register: bool) -> None:
    """Raise `AttachError`, with advice, where gradwire cannot have the module's buckets."""
    if not isinstance(ddp, DistributedDataParallel):
        raise AttachError(
            f"Expected a DistributedDataParallel module, got {type(ddp).__name__}. Do: wrap the model first, "
            "ddp = DistributedDataParallel(model), and attach to ddp."
        )
    if torch_private.has_python_reducer(ddp):
        raise AttachError(
            "Expected a DDP module that hands buckets to its hook, got one made under torch._dynamo.config."
            'optimize_ddp = "python_reducer". Do: set optimize_ddp = True before the module is made.'
        )
    if torch_private.has_mixed_precision(ddp):
        raise AttachError(
            "Expected a free communication hook slot, got one taken by DDP's mixed_precision=. torch has one slot a "
            "module and cannot free it. Do: build the DDP module without mixed_precision= and run the forward under "
            "torch.autocast; gradients then travel as small as the compressor makes them."
        )
    slot = slot_of(ddp)
    if slot.handle is not None:
        raise AttachError(
            "Expected a module without gradwire, got one that is attached. Do: call handle.detach() of the first "
            "attachment before attaching again."
        )
    if register and not slot.registered and torch_private.has_comm_hook(ddp):
        raise AttachError(
            "Expected a free communication hook slot, got one taken by another hook (register_comm_hook). torch has "
            "one slot a module and cannot free it. Do: build the DDP module without that hook and attach gradwire in "
            "its place; or, where that hook is yours, attach with register=False and call handle.hook(state, bucket) "
            "in it."
        )
    if not register and slot.registered:
        raise AttachError(
            "Expected a communication hook slot that is yours, got one that gradwire took when it was attached before. "
            "Do: attach without register=False, or build the DDP module anew."
        )
