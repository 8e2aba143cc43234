"""gradwire in Hugging Face Accelerate: one call after ``prepare``.

    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    handle = gradwire.trainers.accelerate.attach(accelerator, model, "threelc", optimizer=optimizer)

``accelerator.save_state`` and ``load_state`` then save and load the residuals of all ranks, at any number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from gradwire.ddp.gathered import Document
from gradwire.sync.plan import Method, Plan
from gradwire.trainers.packages import require
from gradwire.trainers.single_process import AnyHandle, attach_unless_alone

if TYPE_CHECKING:
    from accelerate import Accelerator


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    method: Method | Mapping[str, Method] | Plan = "threelc",
    *,
    optimizer: object = None,
    checkpoints: bool = True,
    **options: Any,
) -> AnyHandle:
    """Compress gradient synchronization of a model that Accelerate has prepared. Call it on every process.

    Args:
        accelerator: The Accelerator. Its GradScaler is used.
        model: What ``accelerator.prepare`` has returned for the model.
        method: As in `gradwire.attach`.
        optimizer: What ``accelerator.prepare`` has returned for the optimizer, or a list of these.
        checkpoints: If true, register the residuals of all ranks with the Accelerator. Its ``save_state`` and
            ``load_state`` save and load them, in the order of ``register_for_checkpointing``. Like other registered
            objects, they must be registered before ``load_state``, and checkpoints without them do not load.
        options: Further arguments of `gradwire.attach`: ``fidelity``, ``check_every``, ``options``, ``register``.

    Returns:
        The handle. With one process, a handle of which every call does nothing; a line at level INFO says so.

    Raises:
        MissingPackageError: Accelerate is missing or too old.
        AttachError, UnknownNameError, OptionError: As `gradwire.attach`; also if Accelerate trains with FSDP or
            DeepSpeed.
    """
    require("accelerate", "gradwire.trainers.accelerate")
    handle = attach_unless_alone(
        model, method, accelerator.num_processes, optimizer=optimizer, scaler=accelerator.scaler, **options
    )
    if checkpoints:
        accelerator.register_for_checkpointing(_Checkpoint(handle, accelerator))
    return handle


class _Checkpoint:
    """The states of all ranks, as an object that Accelerate saves. It asks every process, and one writes."""

    def __init__(self, handle: AnyHandle, accelerator: Accelerator) -> None:
        self._handle, self._accelerator = handle, accelerator

    def state_dict(self) -> Document:
        everywhere = self._accelerator.project_configuration.save_on_each_node
        return self._handle.gather_state_dict(rank0_only=not everywhere)

    def load_state_dict(self, state: Document) -> None:
        self._handle.load_state_dict(state)
