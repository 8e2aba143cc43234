"""The communication hook slot of a DDP module. torch has one slot per module and cannot free it.

`attach` registers a `HookSlot` there. It calls the attached handle, and after `detach` does what DDP does without a
hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.core import host, torch_private
from gradwire.core.errors import AttachError
from gradwire.core.spec import ELEMENT_TYPES
from gradwire.ddp.wrappers import advice_on


class BucketAverager(Protocol):
    """The part of a handle that a slot calls."""

    def on_bucket(self, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average one bucket."""


class HookSlot:
    """The communication hook of a DDP module.

    Attributes:
        handle: The attached handle. None after `detach`.
        registered: Whether the hook has the module's slot, which it then keeps.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.handle: BucketAverager | None = None
        self.registered = False
        self._ddp = weakref.ref(ddp)

    def register(self, ddp: DistributedDataParallel) -> None:
        """Take the module's slot, unless this hook has it already."""
        if not self.registered:
            # A lambda has no annotations. torch compares annotations as objects, and ours are strings.
            torch_private.register_hook(ddp, lambda state, bucket: self(bucket))
            self.registered = True

    def __call__(self, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return self._native(bucket) if self.handle is None else self.handle.on_bucket(bucket)

    def _native(self, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        ddp = self._ddp()
        assert ddp is not None, "hooks run in a backward pass of the module"
        group = ddp.process_group  # may have been replaced since
        if torch_private.divides_by_active_ranks(ddp):  # DDP does this only without a hook
            if bucket.index() == 0:
                self._active = host.tensor([float(torch_private.in_backward())]).to(ddp.device)
                dist.all_reduce(self._active, group=group)
            bucket.buffer().mul_(group.size() / self._active.item())
        return allreduce_hook(group, bucket)


# Not an attribute of the module, because copies and pickles would have it too. The hook slot of a copy is free.
_slots: weakref.WeakKeyDictionary[DistributedDataParallel, HookSlot] = weakref.WeakKeyDictionary()


def slot_of(ddp: DistributedDataParallel) -> HookSlot:
    """The slot of a module, created on first use."""
    slot = _slots.get(ddp)
    if slot is None:
        slot = _slots[ddp] = HookSlot(ddp)
    return slot


def check_attachable(ddp: object, register: bool) -> None:
    """Raise `AttachError` with advice if gradwire cannot get the module's buckets."""
    if torch_private.is_replicated(ddp):
        raise AttachError(
            "This module is under torch's replicate(), which creates its DDP module in the first forward pass. Run a "
            "forward pass, then attach to that module: gradwire.attach(replicate.state(module)._ddp)."
        )
    if not isinstance(ddp, DistributedDataParallel):
        raise AttachError(advice_on(ddp))
    if torch_private.has_python_reducer(ddp):
        raise AttachError(
            "This DDP module hands no buckets to a hook, because it was created under torch._dynamo.config."
            'optimize_ddp = "python_reducer". Set optimize_ddp = True before the module is created.'
        )
    if torch_private.has_mixed_precision(ddp):
        raise AttachError(
            "DDP's mixed_precision= has the communication hook slot of this module, and torch has one slot per module. "
            "Create the DDP module without mixed_precision= and run the forward pass under torch.autocast. Gradients "
            "then travel as small as the compressor makes them."
        )
    if torch_private.steps_in_backward(ddp):
        raise AttachError(
            "The parameters of this module have optimizers that step within backward (_apply_optimizer_in_backward), "
            "for which DDP takes its one communication hook slot. Use an optimizer that steps after backward."
        )
    check_types(torch_private.trained_parameters(ddp))
    slot = slot_of(ddp)
    if slot.handle is not None:
        raise AttachError("This module is already attached. Call handle.detach() first.")
    if register and not slot.registered and torch_private.has_comm_hook(ddp):
        raise AttachError(
            "Another hook has the communication hook slot of this module (register_comm_hook), and torch has one slot "
            "per module, which it cannot free. Create the DDP module without that hook and attach gradwire in its "
            "place. Or, if the hook is yours, attach with register=False and call handle.hook(state, bucket) in it."
        )
    if not register and slot.registered:
        raise AttachError(
            "gradwire has the communication hook slot of this module from an earlier attach, so you cannot register a "
            "hook of your own. Attach without register=False, or create the DDP module again."
        )


def check_types(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise `AttachError` if the gradients of a parameter cannot be averaged."""
    for name, parameter in parameters:
        if parameter.dtype not in ELEMENT_TYPES:
            raise AttachError(
                f"Parameter {name!r} is {parameter.dtype}. gradwire averages gradients of these types only: "
                f"{', '.join(map(str, ELEMENT_TYPES))}. Keep a complex parameter as a real one with a last dimension "
                "of 2, and call torch.view_as_complex in forward."
            )
