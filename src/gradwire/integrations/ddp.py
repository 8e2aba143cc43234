"""`attach`: compressed gradient synchronisation for a DistributedDataParallel module, and its handle.

A thin adapter on `Synchronizer`: buckets become shards by parameter name, the hook's future is the synchroniser's.

Guarantees: nothing but this module's gradient synchronisation changes; one hook slot is taken for good (torch offers
no way back), and after `detach` it does exactly what DDP does without a hook; an error keeps its type.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.errors import AttachError, SyncError
from gradwire.core.spec import TensorSpec
from gradwire.integrations import torch_private
from gradwire.observe.metrics import Report
from gradwire.observe.trace import Trace
from gradwire.sync.plan import Method, Plan
from gradwire.sync.synchronizer import DEFAULT_TIMEOUT, Shard, Synchronizer

_ADVICE = "This DDP module cannot go on: build it anew, or end the job and resume from a checkpoint."
_SLOT = "_gradwire_slot"  # attribute of a DDP module that holds its trampoline


def attach(
    ddp: DistributedDataParallel,
    method: Method | Mapping[str, Method] | Plan = "threelc",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: str | None = None,
    partitions: int = 1,
    min_elements: int = 16_384,
    feedback: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    stall_timeout: timedelta | None = None,
    seed: int = 0,
    check_every: int = 100,
    dump_dir: str | Path | None = None,
    nodes: int | Sequence[str | int] | None = None,
) -> Handle:
    """Synchronise the gradients of `ddp` compressed, from the next backward on. Every rank calls it alike.

    Args:
        ddp: any DDP module, on Gloo or NCCL.
        method: a compressor's name, a compressor, a mapping from parameter name patterns to either (first match
            counts), or a whole `Plan`.
        optimizer: the optimizer of these parameters. With it, residuals are committed when it steps, so that steps
            skipped by a GradScaler leave no trace; without it, when the next backward begins, unless any rank's
            gradients were not finite.
        strategy: ``"scatter_reduce"``, ``"ring"``, ``"allgather"`` or ``"hierarchical"`` (dense within a node,
            compressed between nodes); None takes the ring for large dense tensors and scatter-reduce for all others.
        partitions: ranges a rank's share of a tensor is cut into.
        min_elements: under a blanket method, vectors and tensors of fewer elements stay dense, in one message.
        feedback: ``"error"`` or ``"none"``; None leaves it to each compressor's default.
        timeout: a rank that gives no sign of life for so long ends the backward of all others with an error.
        stall_timeout: how long a live rank may take to join a step; default ten times `timeout`.
        seed: seed of all random streams.
        check_every: every so many backwards, all ranks compare a hash of their parameters; 0 for never.
        dump_dir: folder of the flight recorder's file, written on a failure.
        nodes: for ``"hierarchical"``: the name of each rank's node in a list, or how many ranks a node has; None takes
            what torchrun says, else the hosts' names.

    Returns:
        The handle: report, state, detach.

    Raises:
        AttachError: not a DDP module, already attached, or its hook slot is taken by another hook.
        UnknownNameError, OptionError: a name or number that does not exist or fit.
        DisagreementError: ranks ask for different things; on every rank, before data is sent.

    On failure: a rank that dies or freezes makes `backward` raise a `SyncError` on every other rank, which names rank,
        tensor and phase. The DDP module must then be built anew.
    """
    _check_attachable(ddp)
    plan = method if isinstance(method, Plan) else Plan(
        method, strategy=strategy, partitions=partitions, min_elements=min_elements, feedback=feedback
    )  # fmt: skip
    synchronizer = Synchronizer(
        ddp.process_group,
        plan,
        tensors={name: TensorSpec.of(parameter) for name, parameter in _trained(ddp)},
        timeout=timeout,
        stall_timeout=stall_timeout,
        seed=seed,
        dump_dir=dump_dir,
        nodes=nodes,
    )
    try:
        handle = Handle(ddp, synchronizer, optimizer, check_every)
    except BaseException:
        synchronizer.close()
        raise
    _slot(ddp).handle = handle
    return handle


class Handle:
    """An attached module. Made by `attach`."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        synchronizer: Synchronizer,
        optimizer: torch.optim.Optimizer | None,
        check_every: int,
    ) -> None:
        self.synchronizer = synchronizer
        self._ddp = weakref.ref(ddp)
        self._check_every = check_every
        self._names = {id(parameter): name for name, parameter in _trained(ddp)}
        self._commits_in_optimizer = optimizer is not None
        self._unhook = None if optimizer is None else optimizer.register_step_post_hook(self._after_step)

    # -- what users call -------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Bytes, ratios, times and residual norms, by tensor and in all, on this rank. Prints as a table."""
        return self.synchronizer.report()

    def trace(self, path: str | Path) -> Trace:
        """Write what synchronisation does from now on as Chrome trace JSON, for ui.perfetto.dev; one file a rank.

        ``with handle.trace("trace.json"):`` around some steps writes ``trace.rank0.json`` and so on; or call `close`
        of what is returned.
        """
        return self.synchronizer.trace(path)

    def state_dict(self) -> dict[str, Any]:
        """Residuals by parameter name, step and seed: a plain dict of tensors and numbers. One file a rank.

        It loads with ``torch.load(..., weights_only=True)``.
        """
        self._settle()
        return self.synchronizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, bit for bit, under whatever bucket layout this module has."""
        self.synchronizer.load_state_dict(state)

    def detach(self) -> None:
        """Return to DDP's own all-reduce. Residuals that were not applied are dropped. Every rank calls it."""
        ddp = self._ddp()
        if ddp is not None and _slot(ddp).handle is self:
            _slot(ddp).handle = None
        if self._unhook is not None:
            self._unhook.remove()
            self._unhook = None
        self.synchronizer.close()

    # -- the hook --------------------------------------------------------------------------------------------

    def on_bucket(self, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average one bucket: what the trampoline calls during backward."""
        with _advising():
            return self._average(bucket)

    def _average(self, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._begin_backward()
        shards = [
            # DDP hands zeros for a parameter that the backward did not reach; its .grad is None then (R10).
            Shard(self._names[id(parameter)], grad, used=parameter.grad is not None)
            for parameter, grad in zip(torch_private.bucket_parameters(bucket), bucket.gradients(), strict=True)
        ]
        # The small tensors of all buckets travel together, with the last one.
        return self.synchronizer.submit(shards, result=bucket.buffer(), hold=not bucket.is_last())

    def _begin_backward(self) -> None:
        if torch_private.in_backward():
            torch_private.after_backward(self._end_backward)
        self._settle()
        self.synchronizer.begin_step()
        ddp = self._ddp()
        if self._check_every and ddp is not None and self.synchronizer.step % self._check_every == 0:
            self.synchronizer.check_replicas(parameter for _, parameter in _trained(ddp))

    def _end_backward(self) -> None:
        """Raise here what went wrong: an exception set on a bucket's future would surface as a cast error."""
        with _advising():
            self.synchronizer.wait()

    def _settle(self) -> None:
        """Without an optimizer to tell, a step counts as taken once the next one begins, or its state is saved."""
        if not self._commits_in_optimizer:
            self.synchronizer.commit()

    def _after_step(self, *_: Any) -> None:
        self.synchronizer.commit()


@contextmanager
def _advising() -> Iterator[None]:
    """Add to what ends a backward, in a hook or after it, what to do with the module."""
    try:
        yield
    except SyncError as error:
        if not error.args[0].endswith(_ADVICE):
            error.args = (f"{error} {_ADVICE}",)
        raise


class _Slot:
    """The one communication hook of a DDP module: calls the attached handle, else does what DDP does natively."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.handle: Handle | None = None
        self._group = ddp.process_group

    def __call__(self, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self.handle is None:
            return allreduce_hook(self._group, bucket)
        return self.handle.on_bucket(bucket)


def _slot(ddp: DistributedDataParallel) -> _Slot:
    """The module's trampoline; registered on first use, and kept, since a hook cannot be unregistered."""
    slot = getattr(ddp, _SLOT, None)
    if slot is None:
        slot = _Slot(ddp)
        # A lambda, because torch compares annotations as objects and ours are strings.
        ddp.register_comm_hook(None, lambda state, bucket: slot(bucket))
        setattr(ddp, _SLOT, slot)
    return slot


def _check_attachable(ddp: object) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise AttachError(
            f"Expected a DistributedDataParallel module, got {type(ddp).__name__}. Do: wrap the model first, "
            "ddp = DistributedDataParallel(model), and attach to ddp."
        )
    slot = getattr(ddp, _SLOT, None)
    if slot is not None and slot.handle is not None:
        raise AttachError(
            "Expected a module without gradwire, got one that is attached. Do: call handle.detach() of the first "
            "attachment before attaching again."
        )
    if slot is None and torch_private.has_comm_hook(ddp):
        raise AttachError(
            "Expected a free communication hook slot, got one taken by another hook (register_comm_hook, or DDP's "
            "mixed_precision=). torch has one slot a module and cannot free it. Do: build the DDP module without that "
            "hook and attach gradwire in its place."
        )


def _trained(ddp: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that DDP synchronises, in its order."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    return [
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
