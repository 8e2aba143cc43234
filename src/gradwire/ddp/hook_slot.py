"""The one communication hook slot of a DDP module, which torch gives out once and never takes back.

What `attach` registers there is a trampoline: it calls what is attached, and with nothing attached does exactly what
DDP does without a hook.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.core import torch_private
from gradwire.core.errors import AttachError
from gradwire.core.spec import ELEMENT_TYPES
from gradwire.ddp.wrappers import advice_on


class BucketAverager(Protocol):
    """What a slot calls: a handle."""

    def on_bucket(self, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average one bucket."""


class HookSlot:
    """The one communication hook of a DDP module: calls the attached handle, else does what DDP does natively.

    Attributes:
        handle: what is attached; None after `detach`.
        registered: whether the module's slot is ours; then for good.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.handle: BucketAverager | None = None
        self.registered = False
        self._ddp = weakref.ref(ddp)

    def register(self, ddp: DistributedDataParallel) -> None:
        """Take the module's hook slot, for good, if it has not been taken for this."""
        if not self.registered:
            # A lambda, because torch compares annotations as objects and ours are strings.
            torch_private.register_hook(ddp, lambda state, bucket: self(bucket))
            self.registered = True

    def __call__(self, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return self._native(bucket) if self.handle is None else self.handle.on_bucket(bucket)

    def _native(self, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        ddp = self._ddp()
        assert ddp is not None, "a hook runs in a backward of its module"
        group = ddp.process_group  # which DDP may have replaced since
        if torch_private.divides_by_active_ranks(ddp):  # as DDP's own path does, but no hook's
            if bucket.index() == 0:
                self._active = torch.tensor([float(torch_private.in_backward())], device=ddp.device)
                dist.all_reduce(self._active, group=group)
            bucket.buffer().mul_(group.size() / self._active.item())
        return allreduce_hook(group, bucket)


# Not in the modules, whose copies and pickles would have them too: a copy's hook slot is free again.
_slots: weakref.WeakKeyDictionary[DistributedDataParallel, HookSlot] = weakref.WeakKeyDictionary()


def slot_of(ddp: DistributedDataParallel) -> HookSlot:
    """The module's trampoline. Made on first use and kept, since a hook cannot be unregistered."""
    slot = _slots.get(ddp)
    if slot is None:
        slot = _slots[ddp] = HookSlot(ddp)
    return slot


def check_attachable(ddp: object, register: bool) -> None:
    """Raise `AttachError`, with advice, where gradwire cannot have the module's buckets."""
    if torch_private.is_replicated(ddp):
        raise AttachError(
            "This module is under torch's replicate(), which makes its DDP module in the first forward. Run a forward, "
            "then attach to that one: gradwire.attach(replicate.state(module)._ddp)."
        )
    if not isinstance(ddp, DistributedDataParallel):
        raise AttachError(advice_on(ddp))
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
    if torch_private.steps_in_backward(ddp):
        raise AttachError(
            "The parameters of this module have optimizers that step within backward (_apply_optimizer_in_backward). "
            "DDP takes its one communication hook slot for them. Use an optimizer that steps after backward."
        )
    for name, parameter in torch_private.trained_parameters(ddp):
        if parameter.dtype not in ELEMENT_TYPES:
            raise AttachError(
                f"Parameter {name!r} is {parameter.dtype}. gradwire averages gradients of these types only: "
                f"{', '.join(map(str, ELEMENT_TYPES))}. Keep a complex parameter as a real one, whose last dimension "
                "is 2, and call torch.view_as_complex in forward."
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
