"""The handle of an attached module: its communication hook, and the calls for users.

The hook turns each bucket of DDP into gradient slices and submits them to the synchronizer. The handle does not keep
the module alive.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.core import threads, torch_private
from gradwire.core.errors import NO_TENSOR, SyncError
from gradwire.core.events import Event
from gradwire.core.spec import ELEMENT_TYPES
from gradwire.ddp.advice import advising, what_to_do
from gradwire.ddp.gathered import Document, GatheredStateful, gather_states, states_of
from gradwire.ddp.hook_slot import check_types, slot_of
from gradwire.ddp.loss_scale import LossScale
from gradwire.ddp.memory_orders import check_memory_orders, memory_orders, spec_in_memory
from gradwire.ddp.momentum import MomentumCheck
from gradwire.ddp.observed import ObservedHandle
from gradwire.ddp.optimizers import Optimizers
from gradwire.ddp.replicas import Replicas, SynchronizedReplicas
from gradwire.sync.submission import GradientSlice
from gradwire.sync.synchronizer import Synchronizer

logger = logging.getLogger("gradwire")


class Handle(ObservedHandle):
    """An attached module, returned by `attach`. As a context manager it is detached at the end, also by an exception.

    Attributes:
        synchronizer: Synchronizer of the module's gradients.
        autopilot: Under ``"auto"``, what chooses the plan, with its decisions. Otherwise None.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        synchronizer: Synchronizer,
        optimizers: Optimizers,
        momentum: MomentumCheck,
        check_every: int,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__(synchronizer)
        self._optimizers = optimizers
        self._momentum = momentum
        self._ddp = weakref.ref(ddp)
        self._group = ddp.process_group
        self._replicas = Replicas(synchronizer, optimizers, ddp.process_group, check_every)
        self._loss_scale = LossScale(synchronizer, optimizers, scaler)
        self._active_ranks = synchronizer.world_size
        self._called = False  # and the number of steps of each optimizer, by its id, before that:
        self._early_steps = Counter[int]()
        self._last_index = sys.maxsize  # of the bucket before, see _is_first
        self._buckets: dict[int, tuple[tuple[int, int, bool], tuple[str, ...], list[GradientSlice]]] = {}  # by index
        self._rests = False  # whether this step is DDP's own all-reduce and nothing else
        self._names = torch_private.parameter_names(ddp)  # frozen parameters too, which may be trained later
        self._reduced: list[str] = []  # names of those that DDP averages, in its order
        warns = synchronizer.rank == 0
        optimizers.listen(self._before_step, self._after_step, has_scaler=scaler is not None, warns=warns)
        synchronizer.on_rollback = optimizers.throw_away
        # A module that is dropped without `detach` takes threads and connections with it.
        self._abandoned = weakref.finalize(ddp, _close_in_background, synchronizer)
        self._abandoned.atexit = False

    def __repr__(self) -> str:
        one, ddp = self.synchronizer, self._ddp()
        method = one.plan if self.autopilot is None else f"auto, now by {self.autopilot.current.name}"
        attached = "attached" if ddp is not None and slot_of(ddp).handle is self else "detached"
        return f"<gradwire.Handle: {method}; rank {one.rank} of {one.world_size}; step {one.step}; {attached}>"

    # -- calls for users -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Residuals by parameter name, step and seed of this rank: a plain dict of tensors and numbers.

        Save one file per rank. It loads with ``torch.load(..., weights_only=True)``.
        """
        self.commit_without_optimizer()
        state = self.synchronizer.state_dict() | {"loss_scale": self._loss_scale.to_save()}
        ddp = self._ddp()
        if ddp is not None:
            state["orders"] = memory_orders(ddp.parameters(), self._names)
        states = self._optimizers.states
        if not states:
            return state
        seen = {"clipped": any(each.clipped for each in states), "common": all(each.common for each in states)}
        return state | seen | {"rates": [each.rates for each in states]}

    def gather_state_dict(self, *, rank0_only: bool = False) -> Document:
        """States of all ranks in one document, for a checkpoint in one file. Call it on every rank, between steps.

        It loads with ``torch.load(..., weights_only=True)``, and `load_state_dict` takes it at any world size.

        Args:
            rank0_only: If true, only rank 0 returns the document, and other ranks return an empty dict.

        On failure: raises a `SyncError` if a rank does not come within ``SyncOptions.stall_timeout``, which may take as
            long as another one writes a checkpoint, or if 16 MiB take longer than ``SyncOptions.timeout``. Residuals do
            not change.
        """
        self.synchronizer.exchange(np.zeros(1))
        self.synchronizer.wait()
        return gather_states(self.state_dict(), self._group, self.synchronizer.timeout, rank0_only=rank0_only)

    @property
    def stateful(self) -> GatheredStateful:
        """The states of all ranks for torch.distributed.checkpoint: ``dcp.save({"gradwire": handle.stateful})``.

        A handle itself would save one rank's state. Each rank holds those of all ranks while it saves or loads.
        """
        return GatheredStateful(self.gather_state_dict, self.load_state_dict)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from `state` bit for bit, under any bucket layout.

        Args:
            state: The state that this rank saved, or the document of `gather_state_dict`, or a list of the states of
                all ranks, in rank order. The last two may be of another number of ranks: `gradwire.resize_state`
                explains how residuals are divided.

        Raises:
            OptionError: The state is of another version, world size or rank, or of parameters in another memory format.
            ValueError, TypeError: The residuals are of other parameters or sizes, or missing.
        """
        state = states_of(state)
        ddp = self._ddp()
        known = [] if ddp is None else [each for each in ddp.parameters() if id(each) in self._names]
        later = {self._names[id(each)]: spec_in_memory(each) for each in known if each.dtype in ELEMENT_TYPES}
        if ddp is not None:
            for saved in [state] if isinstance(state, Mapping) else state:
                check_memory_orders(saved, memory_orders(known, self._names))
        self.synchronizer.load_state_dict(state, later)
        if not isinstance(state, Mapping):
            state = state[self.synchronizer.rank if len(state) == self.synchronizer.world_size else 0]
        self._loss_scale.of_residuals = state.get("loss_scale")
        self._optimizers.throw_away(None)
        for each in self._optimizers.states:
            each.clipped = bool(state.get("clipped", False))
            each.common = bool(state.get("common", True))
        for each, rates in zip(self._optimizers.states, state.get("rates", ()), strict=False):
            each.rates = dict(rates)
        if self.autopilot is not None:
            self.autopilot.restart()

    def synchronize_replicas(self, source: int | None = None) -> SynchronizedReplicas:
        """Copy parameters, buffers and optimizer state of one rank to all ranks. Call it on every rank, between steps.

        Call it after each epoch if replicas may differ (`gradwire.Aggregator.fill_after`), and before a checkpoint.
        Residuals are not copied: a rank's residual is what only this rank has to send.

        Args:
            source: Rank that is copied. None means the rank that has filled the fewest elements since the last call, of
                several the first.

        Returns:
            The source, and how far the parameters of each rank were from its own.

        Raises:
            OptionError: `attach` was not given the optimizer, or its state has something else than tensors and numbers.
            DisagreementError: The optimizer state of ranks differs in shape. Raised on every rank.

        On failure: raises a `SyncError` if a rank does not come within ``SyncOptions.stall_timeout``, or a tensor takes
            longer than ``SyncOptions.timeout``. Replicas may then differ.
        """
        self.commit_without_optimizer()
        return self._replicas.make_equal(self._module, source)

    def rollback(self) -> None:
        """Forget what compression left out of gradients that no optimizer has applied. Call it on every rank.

        Call it when you throw the gradients of a backward pass away (`zero_grad` without a step). Otherwise the next
        pass takes them for gradients that accumulate, and sends what was left out. A step that a GradScaler skips is
        forgotten without it.

        Raises:
            SyncError: The synchronizer has failed.
        """
        self.synchronizer.rollback()

    def detach(self) -> None:
        """Return to DDP's own all-reduce, and drop residuals that were not applied. Call it on every rank."""
        ddp = self._ddp()
        if ddp is not None and slot_of(ddp).handle is self:
            slot_of(ddp).handle = None
        self._optimizers.close()
        self._abandoned.detach()
        self._buckets.clear()
        if not self.synchronizer.forked:  # the parent ends them
            self._end_logs()
        self.synchronizer.close()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._note_error(error)
        self.detach()

    def hook(self, state: Any, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average one bucket within your own communication hook (``register=False`` of `attach`).

        Call it for every bucket, on every rank. It averages the bucket as your hook leaves it; callbacks that you chain
        to the future see the mean. After `detach` it all-reduces the bucket.
        """
        return slot_of(self._module)(bucket)

    # -- the hook --------------------------------------------------------------------------------------------

    def on_bucket(self, bucket: torch_private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average one bucket. Called by the hook slot during backward."""
        first = self._is_first(bucket)
        if first:
            with advising():
                self.synchronizer.raise_if_failed()
            self._between_steps()
        if first and self.autopilot is not None:
            self._rests = self._may_rest() and self.autopilot.rests()
            if self._rests:
                self.synchronizer.count_step()
        if self._rests:
            assert self.autopilot is not None
            self._at_the_end(bucket, first, self._end_rest)
            return self.autopilot.native(bucket)
        with advising():
            return self._average(bucket, first)

    def commit_without_optimizer(self) -> None:
        """Commit the last step if no optimizer was given. With one, its step commits.

        Called when the next step begins, when the state is saved, and by `auto` before it changes the plan.
        """
        if not self._optimizers:
            self.synchronizer.commit()

    @property
    def _module(self) -> DistributedDataParallel:
        ddp = self._ddp()
        assert ddp is not None, "hooks run in a backward pass of the module"
        return ddp

    def _is_first(self, bucket: torch_private.GradBucket) -> bool:
        """Whether a bucket is the first of its backward pass.

        That is bucket 0, unless DDP skips it because no rank has used its parameters (skip_all_reduce_unused_params=).
        Indices increase within a pass.
        """
        index, last = bucket.index(), self._last_index
        self._last_index = index
        return index <= last

    def _at_the_end(self, bucket: torch_private.GradBucket, first: bool, callback: Callable[[], None]) -> None:
        """Call `callback` when the backward pass has ended. Call this for each bucket; a joined rank has no such pass.

        The last bucket belongs to the pass, but one before it may belong to a pass within it, as reentrant checkpoints
        make them. If DDP may skip the last bucket, the first counts: DDP has no such passes then.
        """
        by_first = torch_private.may_skip_buckets(self._module)
        if torch_private.in_backward() and (first if by_first else bucket.is_last()):
            torch_private.after_backward(callback)

    def _average(self, bucket: torch_private.GradBucket, first: bool) -> torch.futures.Future[torch.Tensor]:
        joined = not torch_private.in_backward()
        ddp = self._module
        self._called = True
        if first:
            self._begin_backward(ddp, joined)
        if self._active_ranks != self.synchronizer.world_size:
            bucket.buffer().mul_(self.synchronizer.world_size / self._active_ranks)
        if torch_private.is_sparse(bucket):  # compressors take dense gradients
            future = allreduce_hook(self._group, bucket)
        else:
            future = self._submit(ddp, bucket, joined)
        if bucket.is_last() and (joined or torch_private.waits_before_callbacks(ddp)):
            self._end_backward()
        else:
            self._at_the_end(bucket, first, self._end_backward)
        if bucket.is_last() and joined:
            for names in self._optimizers.owned or (None,):  # as on the ranks whose optimizers step
                self.synchronizer.commit(names)  # none does here, but this rank still owns residuals of sums
        return future

    def _submit(
        self, ddp: DistributedDataParallel, bucket: torch_private.GradBucket, joined: bool
    ) -> torch.futures.Future[torch.Tensor]:
        names, slices = self._slices_of(ddp, bucket)
        may_skip = torch_private.may_skip_parameters(ddp)

        def submit() -> torch.futures.Future[torch.Tensor]:
            given = slices
            if joined or may_skip:
                given = [each._replace(used=not joined and _used(each.tensor)) for each in slices]
            return self.synchronizer.submit(given, result=bucket.buffer())

        future = submit() if self.autopilot is None else self.autopilot.average(bucket, names, submit)
        own = self.autopilot is None or self.autopilot.current.gradwire
        cut = self.synchronizer.need_optimizer if own and not joined else ()
        return self._optimizers.watch(future, bucket, names, cut) if cut else future

    def _may_rest(self) -> bool:
        """Whether nothing but averaging is due in the step that begins."""
        check_due = self._replicas.check_due(self.synchronizer.num_steps + 1)
        ddp = self._module
        same_group = ddp.process_group is self._group
        return same_group and not check_due and not torch_private.divides_by_active_ranks(ddp)

    def _slices_of(
        self, ddp: DistributedDataParallel, bucket: torch_private.GradBucket
    ) -> tuple[tuple[str, ...], list[GradientSlice]]:
        """Return the names of a bucket's parameters, and its gradients. Kept while DDP keeps the bucket."""
        memory = torch_private.bucket_memory(ddp, bucket)
        kept = self._buckets.get(bucket.index())
        if kept is None or kept[0] != memory:
            parameters = torch_private.bucket_parameters(bucket)
            names = tuple(self._names[id(parameter)] for parameter in parameters)
            slices = [GradientSlice(name, grad) for name, grad in zip(names, bucket.gradients(), strict=True)]
            # Parameters that were frozen at attach. Registered here and not by `submit`, because auto plans for them.
            known = self.synchronizer.tensors
            new = [each for each in zip(names, parameters, strict=True) if each[0] not in known]
            check_types(new)
            self.synchronizer.register({name: spec_in_memory(parameter) for name, parameter in new})
            if new:
                self._momentum.add(new)
            kept = self._buckets[bucket.index()] = memory, names, slices
        return kept[1], kept[2]

    def _begin_backward(self, ddp: DistributedDataParallel, joined: bool) -> None:
        if ddp.process_group is not self._group:
            raise SyncError(
                "The process group of this DDP module is no longer the one that gradwire was attached with "
                "(_update_process_group). Call handle.detach() before the group is replaced and attach again after it.",
                tensor=NO_TENSOR,
                phase="begin of backward",
            )
        if self.autopilot is not None:
            self.autopilot.boundary()
        self.commit_without_optimizer()
        self.synchronizer.begin_step(self._optimizers.owned)
        self._loss_scale.begin_backward()
        one, any_step = self.synchronizer, self._optimizers.any_step
        self._momentum.before_backward(one.plan, one.residuals, any_step=any_step)
        self._optimizers.begin_backward(joined)
        if torch_private.discards_means(ddp):
            self.synchronizer.residuals.mark()
        self._active_ranks = self._count_active_ranks(ddp, joined)
        self._replicas.check_if_due(None if joined else ddp)

    def _count_active_ranks(self, ddp: DistributedDataParallel, joined: bool) -> int:
        """The divisor of the sum: all ranks, unless `join` was told to divide by the active ones."""
        if not torch_private.divides_by_active_ranks(ddp):
            return self.synchronizer.world_size
        active = self.synchronizer.exchange(np.array([0.0 if joined else 1.0]))
        self.synchronizer.wait()
        return int(active.value().sum())

    def _end_rest(self) -> None:
        self._last_index = sys.maxsize

    def _end_backward(self) -> None:
        """Raise errors here. On a bucket's future they would surface as a cast error."""
        self._last_index = sys.maxsize
        compared = self._replicas.check_due(self.synchronizer.num_steps)
        if self.autopilot is not None and self.autopilot.only_compares and not compared:
            return
        if torch_private.in_backward() and torch_private.discards_means(self._module):
            torch_private.after_backward(self._forget_discarded)
        started = time.monotonic()
        with advising():
            self.synchronizer.wait()
        self.synchronizer.events.emit(Event("wait", started, time.monotonic() - started))
        if self.synchronizer.state_mismatch:
            self.synchronizer.state_mismatch = False
            self._optimizers.note_mismatch()

    def _forget_discarded(self) -> None:
        """Take residuals back that were sent for parameters which no rank has used, because DDP discards their means.

        Such a parameter is sent if its `.grad` has values of an earlier pass.
        """
        ddp = self._module
        users = torch_private.num_users(ddp)
        if len(self._reduced) != len(users):
            sparse = dict(torch_private.trained_parameters(ddp, sparse=True))
            handed_over = {name for _, names, _ in self._buckets.values() for name in names}
            for known in (handed_over, self.synchronizer.tensors):  # DDP may have skipped buckets so far
                self._reduced = [name for name in self._names.values() if name in known or name in sparse]
                if len(self._reduced) == len(users):
                    break
            else:
                return
        self.synchronizer.discard([name for name, count in zip(self._reduced, users, strict=True) if not count])

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._momentum.before_step(self.synchronizer.plan, optimizer)
        ddp = self._ddp()
        if not self._called and ddp is not None:
            self._expect_averages(ddp, optimizer)

    def _expect_averages(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Warn if an optimizer takes its second step before any gradient was averaged."""
        # torch.distributed.checkpoint takes steps with rates of zero, to create an optimizer's state.
        self._early_steps[id(optimizer)] += any(bool(group.get("lr", True)) for group in optimizer.param_groups)
        if self._early_steps[id(optimizer)] < 2:
            return
        self._called = True  # warn once
        if self.synchronizer.rank == 0:
            logger.warning(
                "The optimizer has stepped, but no gradients were averaged: DDP has handed over none since attach. %s",
                what_to_do(ddp),
            )

    def _after_step(self, names: frozenset[str] | None) -> None:
        if not self._rests:
            self.synchronizer.commit(names)


def _used(grad: torch.Tensor) -> bool:
    """Whether this rank's backward pass used a parameter that it may skip. If no rank used it, DDP discards the mean.

    The values in the bucket decide, because distributed autograd never fills .grad. An unused parameter's gradient is
    zero there, or what `zero_grad(set_to_none=False)` has left. A used parameter whose gradient is zero may count as
    unused: its residual waits for the next gradient.
    """
    return bool(grad.any())


def _close_in_background(synchronizer: Synchronizer) -> None:
    """Close after a module was collected. Any thread may collect it, and may hold locks that closing needs."""
    threads.start("gradwire-close", synchronizer.close, on_error=None)
