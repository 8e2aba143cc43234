"""Attaching where there may be one process only, so that a script needs no condition.

Where there are several, `attach` is `gradwire.attach`. A job of one process sends no gradients: its handle has the same
calls for users and does nothing. It does keep what a checkpoint of several ranks holds, such as residuals and their
loss scale, and saves it again, so that nothing is lost when the job goes on with several ranks.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.core.errors import OptionTypeError
from gradwire.core.spec import ELEMENT_TYPES, TensorSpec
from gradwire.core.torch_private import uncompiled, uncompiled_name
from gradwire.ddp.attach import ALONE, attach
from gradwire.ddp.gathered import GATHERED_VERSION, Document, GatheredStateful, states_of
from gradwire.ddp.handle import Handle
from gradwire.ddp.observed import ObservedHandle, Since
from gradwire.ddp.replicas import SynchronizedReplicas
from gradwire.observe.logs import ScalarLog
from gradwire.sync.group import GroupInfo
from gradwire.sync.plan import Method, Plan
from gradwire.sync.synchronizer import Synchronizer

logger = logging.getLogger("gradwire")


class SingleProcessHandle(ObservedHandle):
    """The handle of a job of one process: nothing is synchronized, and `log_to` writes nothing.

    For its calls, see `gradwire.Handle`.

    Attributes:
        synchronizer: A synchronizer of one rank, which keeps residuals that are loaded.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = [(uncompiled_name(name), each) for name, each in module.named_parameters()]
        parameters = [(name, each) for name, each in parameters if each.dtype in ELEMENT_TYPES]  # others keep none
        tensors = {name: TensorSpec.of(each) for name, each in parameters if each.requires_grad}
        frozen = ((name, each) for name, each in parameters if not each.requires_grad)
        self._frozen = {name: TensorSpec.of(each) for name, each in frozen}
        info = GroupInfo(0, 1, dist.HashStore(), "single process")  # type: ignore[attr-defined]
        super().__init__(Synchronizer(info, "none", tensors=tensors))
        self._loaded: Mapping[str, Any] = {}  # with the entries of several ranks' handles

    def __repr__(self) -> str:
        return "<gradwire.trainers handle of a single process: nothing is compressed>"

    def scalars(self, since: Since = "start") -> dict[str, float]:
        return {}

    def log_to(self, target: Any, every: int = 50, *, all_ranks: bool = False) -> ScalarLog:
        return ScalarLog(lambda scalars, step: None, every, self.scalars, ())

    def state_dict(self) -> dict[str, Any]:
        return {**self._loaded, **self.synchronizer.state_dict()}

    def gather_state_dict(self, *, rank0_only: bool = False) -> Document:
        return {"version": GATHERED_VERSION, "states": [self.state_dict()]}

    @property
    def stateful(self) -> GatheredStateful:
        return GatheredStateful(self.gather_state_dict, self.load_state_dict)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        state = states_of(state)
        self.synchronizer.load_state_dict(state, self._frozen)
        first = state if isinstance(state, Mapping) else state[0]
        self._loaded = {key: value for key, value in first.items() if key != "residuals"}

    def synchronize_replicas(self, source: int | None = None) -> SynchronizedReplicas:
        return SynchronizedReplicas(0, (0.0,))

    def rollback(self) -> None:
        """There is nothing to forget."""

    def detach(self) -> None:
        self.synchronizer.close()

    def __enter__(self) -> SingleProcessHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


AnyHandle = Handle | SingleProcessHandle


def attach_unless_alone(
    module: nn.Module,
    method: Method | Mapping[str, Method] | Plan,
    world_size: int,
    *,
    optimizer: object,
    scaler: torch.amp.GradScaler | None,
    **options: Any,
) -> AnyHandle:
    """Attach to a module that a framework has wrapped, or log that there is one process only.

    Args:
        module: What the framework calls in training.
        method: As in `gradwire.attach`.
        world_size: Number of processes that train.
        optimizer: The framework's optimizer or optimizers, with its wrappers.
        scaler: The framework's GradScaler. One that is disabled counts as none.
        options: Further arguments of `gradwire.attach`.

    Raises:
        AttachError, UnknownNameError, OptionError, OptionTypeError: As `gradwire.attach`.
    """
    if world_size > 1:
        enabled = scaler if scaler is not None and scaler.is_enabled() else None
        return attach(module, method, optimizer=optimizer, scaler=enabled, **options)  # type: ignore[arg-type]
    # Wrong names are errors here, too.
    try:
        inspect.signature(attach).bind(module, method, optimizer=optimizer, scaler=scaler, **options)
    except TypeError as error:
        raise OptionTypeError(
            f"These are not arguments of gradwire.attach: {error}. See help(gradwire.attach)."
        ) from None
    plan = method if isinstance(method, Plan) else Plan(method)
    plan.check_world_size(1)
    logger.info(ALONE)
    module = uncompiled(module)  # type: ignore[assignment]
    wrapped = isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel))
    return SingleProcessHandle(module.module if wrapped else module)  # type: ignore[arg-type]
