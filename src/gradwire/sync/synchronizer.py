"""The synchronizer: averages named tensors over a process group according to a plan.

It knows nothing about DDP. Callers submit lists of gradient slices, and a future completes when all slices of a list
hold the mean.

Guarantees: Every rank ends with the same bits, unless `replicas_may_differ`. Residuals change only when a step is
committed. A failure on any rank ends every rank with one typed error within twice `timeout`, and a rank that lives but
does not join a step within `stall_timeout`. Nothing is sent before all ranks agree on names, shapes, methods and seed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist

from gradwire.compressors.base import StatefulCompressor
from gradwire.compressors.base.arguments import names_unknown_arguments
from gradwire.core.errors import GradwireError, OptionError, SyncError
from gradwire.core.events import Event
from gradwire.core.spec import TensorSpec
from gradwire.net.transport import Transport
from gradwire.observe.metrics import Metrics, Report
from gradwire.residuals import policies
from gradwire.residuals.transaction import Residuals
from gradwire.sync.exchange import MAX_NUMBERS
from gradwire.sync.group import GroupInfo
from gradwire.sync.launcher import Launcher
from gradwire.sync.norm_watch import NormWatch
from gradwire.sync.optimizer_view import OptimizerSlices
from gradwire.sync.options import SyncOptions
from gradwire.sync.peers import Peers
from gradwire.sync.plan import Plan
from gradwire.sync.resize import resize_state
from gradwire.sync.staging import Staging
from gradwire.sync.strategies import STRATEGIES
from gradwire.sync.submission import GradientSlice, Submission
from gradwire.sync.tensor_registry import TensorRegistry
from gradwire.sync.warmup import warm_up

logger = logging.getLogger("gradwire")

STATE_VERSION = 2


class Synchronizer(Peers):
    """Averages tensors over the ranks of a process group.

    Args:
        group: Process group. None means the default group. Without torch.distributed, pass a `GroupInfo`.
        plan: A `Plan`, or the rules of one.
        tensors: Shapes and element types of the full tensors by name, as far as they are known. Ranks agree on other
            tensors when they are registered or first submitted.
        options: Timeouts, seed, nodes, server, and the directory of the flight recorder.
        transport: Carries the frames. None connects a TCP mesh through the group's store.
        order: Which tensor goes first if several are ready. ``"backward"``: the one submitted first, which fills the
            link soonest. ``"forward"``: the one registered first, for callers that wait for each tensor's future when
            the next forward pass needs it.
        aux: Returns the slices of parameter and optimizer state for an element range, by parameter name. Required by
            compressors with `needs_optimizer`.
        settings: Further settings, of the caller, in which ranks must not differ: plain data by name.

    Attributes:
        closed: Whether `close` was called.
        on_rollback: Called when gradients count as thrown away, with names of their tensors; None means all.
        state_mismatch: Whether ranks turned out to hold different optimizer state, in this step or one before. The mean
            of that step is NaN, on all ranks, and it is rolled back like any that is not finite.

    Raises:
        UnknownNameError, OptionTypeError: See `Plan`.
        OptionError: A compressor of the plan needs `aux`, or a strategy needs a server, and there is none. Or
            `transport` is given with `time_slots`.
        DisagreementError: Ranks differ in plan, seed, nodes, time slots, world size or `settings`. Raised on each.
        PeerTimeoutError: A rank did not come within `timeout`.
    """

    @names_unknown_arguments
    def __init__(
        self,
        group: dist.ProcessGroup | GroupInfo | None = None,
        plan: Plan | Any = "none",
        *,
        tensors: Mapping[str, TensorSpec] | None = None,
        options: SyncOptions = SyncOptions(),
        transport: Transport | None = None,
        order: Literal["backward", "forward"] = "backward",
        aux: OptimizerSlices | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan = plan if isinstance(plan, Plan) else Plan(plan)
        super().__init__(group, options)
        if options.time_slots and transport is not None:
            raise OptionError("Time slots belong to the TCP mesh. Leave out transport=, or pass time_slots=False.")
        self.plan.check_world_size(self.world_size)
        self.residuals = Residuals()
        self._metrics = Metrics(self.events)
        self._aux = aux
        self.on_rollback: Callable[[Collection[str] | None], None] = lambda names: None
        self._nonfinite: set[str] = set()  # names of tensors whose means in this step are not finite
        self.state_mismatch = False
        self._watch: NormWatch | None = None
        if options.watch_norms and self.world_size > 1:
            self._watch = NormWatch(options.watch_norms, self.rank, self.events)
        self._num_steps = 0
        self._began: float | None = None  # when the first step did
        self._launcher: Launcher | None = None
        self._tensors = TensorRegistry(self.plan, self.world_size, self._nodes)
        self._addresses = {
            name: address
            for name, strategy in STRATEGIES.items()
            if strategy.address is not None and (address := strategy.address(options.server)) is not None
        }
        tensors = tensors or {}
        self._prepare(self.plan, tensors)
        self._agree(
            {
                "world_size": self.world_size,
                "seed": self.seed,
                "timeout": self.timeout.total_seconds(),
                "nodes": self._nodes.names,
                "time_slots": options.time_slots,
                "watch_norms": options.watch_norms,
                "services": {name: address.describe() for name, address in sorted(self._addresses.items())},
                "tensors": self._tensors.describe(tensors),
                **(settings or {}),
            }
        )
        self._tensors.add(tensors)
        if self.world_size > 1:
            self._start(transport, self._tensors, self.residuals)
            assert self._engine is not None
            self._launcher = Launcher(
                self._engine,
                self._runtime,
                self._tensors,
                self._rounds,
                aux=aux,
                forward_first=order == "forward",
                on_nonfinite=self._mark_nonfinite,
                check=self._check,
            )
            self._connect_services(self._tensors)
        if self.rank == 0:
            for note in self.plan.notes(self.tensors):
                logger.warning("%s", note)

    # -- tensors and plan ------------------------------------------------------------------------------------

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Tensors that all ranks have agreed on, by name."""
        return self._tensors.specs

    @property
    def need_optimizer(self) -> frozenset[str]:
        """Names of the tensors whose compressor under the current plan needs the optimizer's state."""
        return self._tensors.need_optimizer

    @property
    def num_steps(self) -> int:
        """Steps since the synchronizer was created. Unlike `step`, it does not continue from a loaded state."""
        return self._num_steps

    def register(self, specs: Mapping[str, TensorSpec]) -> None:
        """Agree with all ranks on tensors, in this order. `submit` does it for new names.

        Raises:
            OptionError: A name is already registered with another shape or element type.
            DisagreementError: Names, shapes, element types or methods differ. Raised on every rank, before any data is
                sent.
        """
        new = {name: spec for name, spec in specs.items() if name not in self._tensors.ids}
        for name, spec in specs.items():
            known = self._tensors.specs.get(name, spec)
            if known != spec:
                raise OptionError(f"{name!r} is already registered as {known}, not {spec}. Use another name.")
        if new:
            self._prepare(self.plan, new)
            self._tensors.add(new)  # first, because a peer that has heard the verdict may send before this rank has
            try:
                self._agree_on(new)
            except GradwireError:
                self._tensors.forget(new)
                raise

    def replan(self, plan: Plan) -> None:
        """Use another plan from the next submission on. Call it on all ranks, between steps.

        Residuals are kept: each range takes over what earlier plans have left in it. A tensor that needs no residual
        under the new plan sends what is left in its next step.

        Raises:
            SyncError: The synchronizer has failed, or a step is neither committed nor rolled back.
            OptionError: As for the constructor, or the server does not know the tensors of the plan.
            DisagreementError: Ranks have different plans. Raised on every rank.

        On failure: All ranks keep the plan that they had.
        """
        self.wait()
        if self.residuals.is_open:
            raise SyncError("The current step is still open. Call commit() or rollback() before replan().")
        specs = self._tensors.specs
        self._prepare(plan, specs)
        # Everything sent under the old plan is here, and no rank sends under the new one before all have agreed.
        before = self.plan
        self._tensors.replan(plan)
        self.plan = plan
        try:
            self._agree_on(specs)
        except GradwireError as error:
            self._tensors.replan(before)
            self.plan = before
            if not isinstance(error, SyncError) and self.failure is None:
                self._agree_on(specs)  # no rank sends before all have their plans back
            raise
        for name, entry in self._tensors.entries.items():
            if not policies.get(entry.feedback).has_velocity:
                self.residuals.drop_velocity(name)
        self.events.emit(Event("replan", time.monotonic(), detail={"step": self.step}))

    def _prepare(self, plan: Plan, specs: Mapping[str, TensorSpec]) -> None:
        """Check that this synchronizer has what a plan needs for tensors, then compile its kernels."""
        entries = {name: plan.entry(name, spec) for name, spec in specs.items()}
        for name, entry in entries.items():
            strategy, compressor = STRATEGIES[entry.strategy], entry.compressor
            if strategy.address is not None and strategy.name not in self._addresses:
                raise OptionError(
                    f"strategy={strategy.name!r} needs the address of a server, and there is none (in {name!r}). "
                    f"{strategy.address_advice}"
                )
            if compressor.needs_optimizer and self._aux is None:
                raise OptionError(
                    f"{compressor.name!r} needs the optimizer of {name!r}, and there is none. Pass it, "
                    f'attach(ddp, "{compressor.name}", optimizer=opt), or use "lossless", which needs none.'
                )
        if self.world_size > 1:
            warm_up(((entry, specs[name].dtype) for name, entry in entries.items()), self.world_size)

    def _agree_on(self, specs: Mapping[str, TensorSpec]) -> None:
        """Agree with all ranks on tensors and their entries, and connect to the services that these need."""
        if self._engine is not None:
            self._engine.early_frames.limit = self._tensors.early_bytes_limit()
        self._agree({"tensors": self._tensors.describe(specs)})
        self._connect_services(self._tensors)

    # -- averaging -------------------------------------------------------------------------------------------

    def submit(self, slices: Sequence[GradientSlice], result: torch.Tensor | None = None) -> torch.futures.Future[Any]:
        """Average gradient slices over all ranks, in place. Returns at once.

        All ranks submit the same slices in the same order.

        Args:
            slices: Gradient slices to average.
            result: Value of the future. None means the list of tensors.

        Returns:
            A future of `result`, or of the list of tensors.

        Raises:
            SyncError: The synchronizer has failed before.
            OptionError: A range outside of its parameter, another element type, or a range of a tensor that must be
                submitted in full.

        On failure: The future and `wait` raise the error, which names rank, tensor and phase, and so do later calls.
            Gradients of the step are undefined. Residuals are those of the last commit.
        """
        self.raise_if_failed()
        self.register({each.name: _full_spec(each) for each in slices if each.name not in self._tensors.ids})
        if self._watch is not None and self._watch.watches(self._num_steps):
            self._watch.take(self.step, slices)
        tensors = [each.tensor for each in slices]
        submission = Submission(Staging(tensors), tensors if result is None else result)
        if self._launcher is not None:
            self._launcher.submit(slices, submission, self.step)
        else:
            for each in slices:
                self._check(each)
        try:
            submission.arrived()
        except SyncError as error:
            if self._engine is not None:
                self._engine.fail(error)
            raise
        return submission.future

    def _check(self, each: GradientSlice) -> None:
        spec, count = self._tensors.specs[each.name], each.tensor.numel()
        if each.tensor.dtype != spec.dtype or not 0 <= each.offset <= spec.numel - count:
            raise OptionError(
                f"{each.name!r} is registered as {spec}, but {count} elements of {each.tensor.dtype} from element "
                f"{each.offset} on were submitted. Submit a range of what is registered."
            )
        entry = self._tensors.entries[each.name]
        needs_full = entry.compressor.requires_full_tensor or STRATEGIES[entry.strategy].requires_full_tensor
        if needs_full and count != spec.numel:
            raise OptionError(
                f"{entry.compressor!r} by strategy={entry.strategy!r} needs all {spec.numel} elements of {each.name!r} "
                f"at once, but {count} were submitted. Submit full tensors, or choose another compressor or strategy."
            )

    def _has_nonfinite(self, names: Collection[str] | None) -> bool:
        return bool(self._nonfinite) if names is None else not self._nonfinite.isdisjoint(names)

    def _mark_nonfinite(self, names: Collection[str], mismatch: bool) -> None:
        self._nonfinite.update(names)
        self.state_mismatch |= mismatch

    # -- the step as a transaction ---------------------------------------------------------------------------

    def begin_step(self, owned: Sequence[Collection[str]] = ()) -> None:
        """Begin the next step. If the last one was not finite and not committed, roll it back first.

        Args:
            owned: Names of the tensors of each optimizer, if there are several: those of one with finite means stay.
        """
        self.wait()
        for names in owned or (None,):
            if self._has_nonfinite(names):
                self.rollback(names)
        if self._nonfinite:
            self.rollback(frozenset(self._nonfinite))  # tensors that no optimizer has
        if self._watch is not None and self._watch.watches(self._num_steps):
            self._compare_norms(self._watch)
        self.count_step()

    def _compare_norms(self, watch: NormWatch) -> None:
        """Exchange the norms of the step that has ended. Returns at once."""
        names, norms = self._tensors.names, watch.norms(self.step, self._tensors.ids)
        for start in range(0, norms.size, MAX_NUMBERS):
            piece = slice(start, start + MAX_NUMBERS)
            self._exchange("norms", norms[piece], partial(watch.compare, self.step, start, names[piece]), "norms")

    def count_step(self) -> None:
        """Count a step. `begin_step` does; call this instead for a step whose gradients others average."""
        self._began = self._began or time.monotonic()
        self.step += 1
        self._num_steps += 1

    def commit(self, names: Collection[str] | None = None) -> None:
        """Commit the staged residuals. If one of the means is not finite, they are rolled back instead.

        Args:
            names: Names of the tensors to commit. None means all.
        """
        self.wait()
        if self._has_nonfinite(names):
            self.rollback(names)
            return
        self.residuals.commit(names)
        self.events.emit(Event("commit", time.monotonic(), detail={"step": self.step}))

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Return the residuals to the last commit, bit for bit.

        Args:
            names: Names of the tensors. None means all.
        """
        self.wait()
        self.residuals.rollback(names)
        self.on_rollback(names)
        if self._watch is not None:
            self._watch.discard()
        detail = {"step": self.step, "num_steps": self._num_steps, "finite": not self._has_nonfinite(names)}
        self._nonfinite -= self._nonfinite if names is None else set(names)
        self.events.emit(Event("rollback", time.monotonic(), detail=detail))

    def discard(self, names: Collection[str]) -> None:
        """Return residuals to `Residuals.mark`, because the means since then were thrown away for these tensors."""
        self.wait()
        self.residuals.return_to_mark(names)
        self._nonfinite -= set(names)

    def rescale(self, factor: float) -> None:
        """Multiply residuals by `factor`, because the loss scale of the gradients has changed by it."""
        self.wait()
        self.residuals.scale(factor)
        for name, entry in self._tensors.entries.items():
            compressor = entry.compressor
            if isinstance(compressor, StatefulCompressor) and compressor.state_source == "payload":
                self.residuals.states.drop(name)  # may be in units of the gradient

    # -- report, state ---------------------------------------------------------------------------------------

    def report(self, *, with_norms: bool = True) -> Report:
        """Bytes, ratios and times of this rank, per tensor and in total, since the synchronizer was created.

        Args:
            with_norms: Whether to look at the residuals, which takes one pass over their memory.

        Raises:
            SyncError: This is a forked child's copy.
        """
        if self.forked:
            self.raise_if_failed()
        found = self.residuals.norms() if with_norms else {}
        norms = {name: math.hypot(*by_role.values()) for name, by_role in found.items()}
        report = self._metrics.report(self.rank, self.world_size, self._num_steps, norms)
        report.seconds = 0.0 if self._began is None else time.monotonic() - self._began
        report.link_seconds = self.link_busy_seconds() / max(1, self.world_size - 1)
        report.notes = self.plan.notes(self.tensors) + (self._watch.notes() if self._watch is not None else [])
        if filled := report.total.filled_elements:
            report.notes.append(
                f"{filled:,} elements had a mean of zero on this rank, because their sums did not come in time. Call "
                "handle.synchronize_replicas() after each epoch."
            )
        return report

    def state_dict(self) -> dict[str, Any]:
        """State of this rank, from which a job resumes bit for bit: a plain dict of tensors and numbers.

        Save one file per rank. Residuals that are staged but not committed are not part of it.
        """
        self.wait()
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "seed": self.seed,
            "rank": self.rank,
            "world_size": self.world_size,
            "residuals": self.residuals.state_dict(),
        }

    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        later: Mapping[str, TensorSpec] = MappingProxyType({}),
    ) -> None:
        """Load a state of `state_dict`, saved under any bucket layout.

        Args:
            state: The state that this rank saved in a group of the same size, or a list of the states of all ranks of
                a group of any size, in rank order. `resize_state` explains what this rank takes of a list.
            later: Tensors that may be registered later, and keep their residuals until then.

        Raises:
            OptionError: The state is of another version, world size or rank.
            ValueError, TypeError: The residuals are of other parameters or sizes, or missing.
        """
        self.wait()
        if not isinstance(state, Mapping):
            state = resize_state(state, self.world_size)[self.rank]
        for key, own in (("version", STATE_VERSION), ("world_size", self.world_size), ("rank", self.rank)):
            if state.get(key) != own:
                raise OptionError(
                    f"The state has {key} {state.get(key)!r}, but this rank has {key} {own}. Load the state that the "
                    "same rank saved in a group of the same size, or a list of the states of all ranks."
                )
        self.residuals.load_state_dict(state["residuals"], {**later, **self._tensors.specs})
        self.step = int(state["step"])
        self.seed = int(state["seed"])
        if self._engine is not None:
            self._runtime.seed = self.seed
        self._nonfinite.clear()

    def close(self) -> None:
        """End threads and connections. Idempotent. All ranks call it."""
        super().close()
        self._metrics.close()


def _full_spec(each: GradientSlice) -> TensorSpec:
    """The spec of a tensor that is submitted without being registered."""
    if each.offset:
        raise OptionError(
            f"A range of {each.name!r} was submitted, but the tensor is not registered. Call "
            "register({name: TensorSpec(shape, dtype)}) with the shape of the full parameter first."
        )
    return TensorSpec.of(each.tensor)
