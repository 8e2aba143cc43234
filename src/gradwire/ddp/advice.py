"""What the user of an attached module can do about an error, or about a hook that is never called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.parallel import DistributedDataParallel

from gradwire.core import torch_private
from gradwire.core.errors import SyncError
from gradwire.ddp.hook_slot import slot_of

_ADVICE = "Create the DDP module again, or end the job and resume from a checkpoint."


@contextmanager
def advising() -> Iterator[None]:
    """Add advice about the module to an error that ends a backward pass."""
    try:
        yield
    except SyncError as error:
        if not error.args[0].endswith(_ADVICE):
            error.args = (f"{error} {_ADVICE}",)
        raise


def what_to_do(ddp: DistributedDataParallel) -> str:
    """Advice for each possible reason why the hook was never called."""
    advice = ["Call the DDP module, not the model in it."]
    if not slot_of(ddp).registered:
        advice.append("Call handle.hook(state, bucket) in the hook that you register, as register=False asks for it.")
    parameters = torch_private.trained_parameters(ddp)
    unused = [name for name, parameter in parameters if parameter.grad is None]
    if 0 < len(unused) < len(parameters):
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        advice.append(f"Use {unused[0]!r}{more} in the loss, or pass find_unused_parameters=True to DDP.")
    else:
        advice.append("Convert the model's dtype before DDP wraps it: afterwards DDP no longer sees the gradients.")
    return " Or: ".join(advice)
