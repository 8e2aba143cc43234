"""The synchronizer: averages named tensors over a process group, as their plan says.

It knows nothing of DDP. A submission is a list of shards (a tensor, its parameter's name, the range of elements it
holds); each becomes one task graph, small ones share one, and a future tells when all of them hold the mean.

Guarantees: every rank ends with the same bits; residuals change only when a step is committed; a failure anywhere
ends every rank with one typed error within twice `timeout`; nothing is sent before all ranks agree on names,
shapes, methods and seed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from gradwire.compressors.base import StatefulCompressor
from gradwire.compressors.base.arguments import names_unknown_arguments
from gradwire.core.errors import GradwireError, OptionError, SyncError
from gradwire.core.events import Event
from gradwire.core.spec import ElementRange, TensorSpec
from gradwire.net.transport import Transport
from gradwire.observe.metrics import Metrics, Report
from gradwire.residuals import policies
from gradwire.residuals.transaction import Residuals
from gradwire.sync.dense_fusion import BATCH_FLAG, DenseFusionGroup, PendingSlice, PendingSlices, batch_entry
from gradwire.sync.fusion import BUNDLE_FLAG, FusionGroup, bundle_items, travels_in_bundles
from gradwire.sync.graph import TaskGraph
from gradwire.sync.group import GroupInfo
from gradwire.sync.job import TensorJob
from gradwire.sync.options import SyncOptions
from gradwire.sync.peers import Peers
from gradwire.sync.plan import Plan
from gradwire.sync.plan_entry import PlanEntry
from gradwire.sync.registry import TensorRegistry
from gradwire.sync.resize import resize_state
from gradwire.sync.staging import Staging
from gradwire.sync.strategies import STRATEGIES
from gradwire.sync.strategies.register import ServiceAddress
from gradwire.sync.submission import GradientSlice, Submission
from gradwire.sync.warmup import warm_up

logger = logging.getLogger("gradwire")

STATE_VERSION = 2


class Synchronizer(Peers):
    """Averages tensors over the ranks of a process group.

    Args:
        group: process group; None is the default group; a `GroupInfo` where there is no torch.distributed.
        plan: a `Plan`, or what `Plan` takes as rules.
        tensors: specs of the whole tensors by name, where they are known; others are agreed on as they come.
        options: Timeouts, seed, nodes and server.
        transport: carries the frames; None makes a TCP mesh through the group's store.
        order: what goes first where several tensors have work ready: ``"backward"``, what was submitted first, which
            fills the link soonest; ``"forward"``, what was registered first, which the next forward needs first, for
            those who wait for each tensor's future by itself.
        aux: gives the slices of parameters and optimizer state that encodes of a range need, by parameter name and
            range; for compressors with `needs_optimizer`.

    Raises:
        UnknownNameError, OptionTypeError: see `Plan`.
        OptionError: a compressor of the plan needs `aux` and there is none.
        DisagreementError: ranks differ in plan, seed, nodes or world size; on every rank.
        PeerTimeoutError: a rank did not come within `timeout`.
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
        aux: Callable[[str, ElementRange], Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        self.plan = plan if isinstance(plan, Plan) else Plan(plan)
        super().__init__(group, options)
        if self.plan.has_velocity and self.world_size == 1:
            raise OptionError(
                "Expected at least two ranks with momentum correction, got one, which has nothing to synchronize. Do: "
                'keep the momentum in the optimizer, with feedback="error" or none given.'
            )
        self.residuals = Residuals()
        self._metrics = Metrics(self.events)
        self._forward_first = order == "forward"
        self._aux = aux
        self._nonfinite = False
        self._num_steps = 0  # begun here; `step` goes on where a loaded state ended
        self._held = PendingSlices()
        self._tensors = TensorRegistry(self.plan, self.world_size, self._nodes)
        self._addresses = _addresses(options.server)
        self._expect_addresses(tensors or {}, self.plan)
        self._expect_aux(tensors or {})
        self._warm_up(tensors or {})
        self._agree(
            {
                "world_size": self.world_size,
                "seed": self.seed,
                "timeout": self.timeout.total_seconds(),
                "nodes": self._nodes.names,
                "services": {name: address.describe() for name, address in sorted(self._addresses.items())},
                "tensors": self._tensors.describe(tensors or {}),
            }
        )
        self._tensors.add(tensors or {})
        if self.world_size > 1:
            self._start(transport, self._tensors, self.residuals)
            self._connect_services(self._tensors)
        if self.rank == 0:
            for note in self.plan.notes(self.tensors):
                logger.warning("%s", note)

    # -- setting up ------------------------------------------------------------------------------------------

    def register(self, specs: Mapping[str, TensorSpec]) -> None:
        """Agree with all ranks on tensors, in this order. Done by `submit` for names it has not seen.

        Raises:
            DisagreementError: names, shapes, dtypes or methods differ; on every rank, before data is sent.
        """
        new = {name: spec for name, spec in specs.items() if name not in self._tensors.ids}
        for name, spec in specs.items():
            known = self._tensors.specs.get(name, spec)
            if known != spec:
                raise OptionError(f"Expected {name!r} of {known}, got {spec}. Do: give another tensor another name.")
        if new:
            self._expect_addresses(new, self.plan)
            self._expect_aux(new)
            self._warm_up(new)
            # Added first: a peer that has heard the verdict may send before this rank has.
            self._tensors.add(new)
            if self._engine is not None:
                self._engine.early_bytes_limit = self._tensors.early_bytes_limit()
            try:
                self._agree({"tensors": self._tensors.describe(new)})
                self._connect_services(self._tensors)
            except GradwireError:
                self._tensors.forget(new)
                raise

    def replan(self, plan: Plan) -> None:
        """Go on with another plan from the next submission on. Between steps; all ranks call it alike.

        What residuals hold is kept: an encoder takes over that of its range under whatever plan it was left. Tensors
        that are exact from now on, and so need no residual, give it out with their next step.

        Raises:
            SyncError: the synchronizer has failed, or a step is still open.
            DisagreementError: ranks have different plans; on every rank.
        """
        self.wait()
        if self.residuals.is_open:
            raise SyncError("Expected a step that is decided, got an open one. Do: call commit() or rollback() first.")
        self._expect_addresses(self._tensors.specs, plan)
        # All that this rank waited for is here, so nothing more comes under the old plan; and nobody sends under the
        # new one before all have agreed.
        self._tensors.replan(plan)
        self.plan = plan
        for name, entry in self._tensors.entries.items():
            if not policies.get(entry.feedback).has_velocity:
                self.residuals.drop_velocity(name)
        self._warm_up(self._tensors.specs)
        if self._engine is not None:
            self._engine.early_bytes_limit = self._tensors.early_bytes_limit()
        self._agree({"tensors": self._tensors.describe(self._tensors.specs)})
        self._connect_services(self._tensors)
        self.events.emit(Event("replan", time.monotonic(), detail={"step": self.step}))

    def _expect_aux(self, specs: Mapping[str, TensorSpec]) -> None:
        if self._aux is not None:
            return
        for name, spec in specs.items():
            compressor = self.plan.entry(name, spec).compressor
            if compressor.needs_optimizer:
                raise OptionError(
                    f"Expected the optimizer of the parameters for {compressor.name!r}, got none (in {name!r}). Do: "
                    f'attach(ddp, "{compressor.name}", optimizer=opt), or use "lossless", which needs none.'
                )

    def _expect_addresses(self, specs: Mapping[str, TensorSpec], plan: Plan) -> None:
        for name, spec in specs.items():
            strategy = STRATEGIES[plan.entry(name, spec).strategy]
            if strategy.address is not None and strategy.name not in self._addresses:
                raise OptionError(
                    f"strategy={strategy.name!r} needs the address of a server, and there is none (in {name!r}). "
                    f"{strategy.address_advice}"
                )

    def _warm_up(self, specs: Mapping[str, TensorSpec]) -> None:
        if self.world_size > 1:
            warm_up(((self.plan.entry(name, spec), spec.dtype) for name, spec in specs.items()), self.world_size)

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """What all ranks have agreed on, by name."""
        return self._tensors.specs

    # -- averaging -------------------------------------------------------------------------------------------

    def submit(
        self, shards: Sequence[GradientSlice], result: torch.Tensor | None = None, *, hold: bool = False
    ) -> torch.futures.Future[Any]:
        """Average shards over all ranks, in place; return at once.

        All ranks submit the same shards in the same order.

        Args:
            shards: what to average.
            result: what the future shall hold in place of the list of tensors.
            hold: keep tensors of batches back, to travel in one message with those of the submissions that follow,
                until their batch is complete, or a submission comes without `hold` (or `wait`).

        Returns:
            A future of the list of tensors, or of `result`.

        Raises:
            SyncError: the synchronizer has failed before.
            OptionError: a range that is not one of its parameter's, or an element type that is not its own.

        On failure: the future and `wait` raise the error, which names rank, tensor and phase. Later calls raise it
            again. Gradients of the step are undefined, residuals are as at the last commit.
        """
        self.register({shard.name: self._spec(shard) for shard in shards if shard.name not in self._tensors.ids})
        for shard in shards:
            self._check_range(shard)
        value = [shard.tensor for shard in shards] if result is None else result
        submission = Submission(Staging([shard.tensor for shard in shards]), value)
        together: list[TensorJob] = []
        for index, shard in enumerate(shards):
            if self._engine is None or shard.tensor.numel() == 0:
                continue
            entry = self._tensors.entries[shard.name]
            if entry.batched:
                submission.expect()
                self._held.add(PendingSlice(self._tensors.ids[shard.name], shard, submission))
                continue
            item = self._item(shard, index, submission.staging)
            if travels_in_bundles(entry, self._tensors.specs[shard.name].numel):
                together.append(item)
            else:
                submission.expect()
                self._launch(item, submission, [item.name])
        for bundle in bundle_items(together, self._rounds):
            submission.expect()
            self._launch(bundle, submission, [item.name for item in bundle.members])
        self._send_held(complete=hold)
        submission.arrived()
        return submission.future

    def wait(self) -> None:
        """Block until everything submitted holds its mean.

        Raises:
            SyncError: the synchronizer failed; within twice `timeout`.
        """
        if self._engine is not None:
            self._send_held()
        super().wait()

    def _spec(self, shard: GradientSlice) -> TensorSpec:
        if shard.offset:
            raise OptionError(
                f"Expected {shard.name!r} to be registered before a range of it is submitted. Do: call "
                "register({name: TensorSpec(shape, dtype)}) with the whole parameter's shape."
            )
        return TensorSpec.of(shard.tensor)

    def _check_range(self, shard: GradientSlice) -> None:
        spec, count = self._tensors.specs[shard.name], shard.tensor.numel()
        if shard.tensor.dtype != spec.dtype or not 0 <= shard.offset <= spec.numel - count:
            raise OptionError(
                f"Expected a range of {shard.name!r}, {spec}, got {count} elements of {shard.tensor.dtype} from "
                f"element {shard.offset} on. Do: submit what was registered, or register the whole parameter first."
            )
        entry = self._tensors.entries[shard.name]
        if (
            entry.compressor.requires_full_tensor or STRATEGIES[entry.strategy].requires_full_tensor
        ) and count != spec.numel:
            why = f"{entry.compressor!r} by strategy={entry.strategy!r} needs whole"
            raise OptionError(
                f"Expected all {spec.numel} elements of {shard.name!r}, which {why}, got {count}. Do: submit whole "
                "tensors, or choose another compressor or strategy for it."
            )

    def _item(self, shard: GradientSlice, index: int, staging: Staging) -> TensorJob:
        return TensorJob(
            shard.name,
            self._tensors.ids[shard.name],
            staging.whole(index),
            self._entry(shard.name),
            next(self._rounds),
            self.step,
            shard.offset,
            shard.used,
            wait_loaded=staging.wait_loaded,
            shape=self._tensors.specs[shard.name].shape,
            place=self._tensors.places.get(shard.name, 0),
            aux=self._aux_of(shard.name),
        )

    def _aux_of(self, name: str) -> Callable[[ElementRange], Mapping[str, torch.Tensor]] | None:
        needed = self._tensors.entries[name].compressor.needs_optimizer
        return partial(self._aux, name) if needed and self._aux is not None else None

    def _entry(self, name: str) -> PlanEntry:
        """The tensor's entry, with feedback where another plan has left a residual to give out."""
        entry = self._tensors.entries[name]
        if entry.feedback == "none" and self.residuals.holds(name):
            return replace(entry, feedback="error")
        return entry

    def _send_held(self, complete: bool = False) -> None:
        """Send the batches held so far, or only those that are complete."""
        for members in self._held.take(self._tensors.batches, complete):
            batch = DenseFusionGroup(members, self.residuals, self.world_size)
            entry = batch_entry(self._tensors.entries[members[0].shard.name])
            item = TensorJob(
                *(batch.name, batch.tensor, batch.values, entry, next(self._rounds), self.step),
                wait_loaded=batch.staging.wait_loaded,
            )
            self._launch(item, batch, [held.shard.name for held in members])

    def _launch(
        self, item: TensorJob | FusionGroup, waiting: Submission | DenseFusionGroup, members: list[str]
    ) -> None:
        assert self._engine is not None
        submitted = time.monotonic()
        dense_bytes = 2 * (self.world_size - 1) * item.nbytes // self.world_size
        method = f"{item.entry.compressor!r} {item.entry.strategy}"
        detail = {"method": method, "elements": item.num_elements, "members": members}
        self.events.emit(Event("submit", submitted, 0.0, item.name, item.round, dense_bytes, detail=detail))

        def done() -> None:
            self._nonfinite |= item.nonfinite
            builder.arrived()
            self.events.emit(Event("done", submitted, time.monotonic() - submitted, item.name, item.round))
            waiting.arrived()

        priority = item.tensor & ~(BATCH_FLAG | BUNDLE_FLAG) if self._forward_first else item.round
        graph = TaskGraph(item.name, item.round, priority, on_done=done, on_failed=waiting.failed)
        strategy = STRATEGIES[item.entry.strategy]
        builder = strategy.builder(item, graph, self._around)
        strategy.build(builder)
        self._engine.run(graph)

    # -- the step as a transaction ---------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin the next step: what was staged under a non-finite step is rolled back first, on all ranks alike."""
        self.wait()
        if self._nonfinite:
            self.rollback()
        self.step += 1
        self._num_steps += 1

    def commit(self, names: Collection[str] | None = None) -> None:
        """Make the residuals staged so far those that count; a non-finite step is rolled back instead, as a whole.

        Args:
            names: of which tensors; None for all.
        """
        self.wait()
        if self._nonfinite:
            self.rollback()
            return
        self.residuals.commit(names)
        self.events.emit(Event("commit", time.monotonic(), detail={"step": self.step}))

    def rollback(self) -> None:
        """Return the residuals to the last commit, bit for bit."""
        self.wait()
        self.residuals.rollback()
        self._nonfinite = False
        self.events.emit(Event("rollback", time.monotonic(), detail={"step": self.step}))

    def rescale(self, factor: float) -> None:
        """Gradients are `factor` times as large from now on (another loss scale), so residuals must be, too."""
        self.wait()
        self.residuals.scale(factor)
        for name, entry in self._tensors.entries.items():
            compressor = entry.compressor
            if isinstance(compressor, StatefulCompressor) and compressor.state_source == "payload":
                self.residuals.states.drop(name)  # it may be in units of the gradient

    # -- report, state ---------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Bytes, ratios and times by tensor and in all, on this rank, since this synchronizer was made."""
        norms = {name: math.hypot(*by_role.values()) for name, by_role in self.residuals.norms().items()}
        report = self._metrics.report(self.rank, self.world_size, self._num_steps, norms)
        report.notes = self.plan.notes(self.tensors)
        return report

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed job needs to go on bit for bit: plain dict of tensors and numbers.

        It is this rank's own: save one file a rank. Staged residuals of an undecided step are not in it.
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

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take over a state of `state_dict`, made under any bucket layout.

        Args:
            state: what this rank saved, in a group of the same size; or the states of all ranks of a group of any
                size, in their order, of which this rank takes its part (see `resize_state`).

        Raises:
            OptionError: another version, world size or rank.
            ValueError, TypeError: residuals of other parameters or sizes, or no residuals at all.
        """
        self.wait()
        if not isinstance(state, Mapping):
            state = resize_state(state, self.world_size)[self.rank]
        for key, expected in (
            ("version", STATE_VERSION),
            ("world_size", self.world_size),
            ("rank", self.rank),
        ):
            if state.get(key) != expected:
                raise OptionError(
                    f"Expected a state of {key} {expected}, got {state.get(key)!r}. Do: load on each rank the state "
                    "that the same rank saved, in a group of the same size, or a list of the states of all old ranks."
                )
        self.residuals.load_state_dict(state["residuals"], self._tensors.specs)
        self.step = int(state["step"])
        self.seed = int(state["seed"])
        if self._engine is not None:
            self._around.seed = self.seed
        self._nonfinite = False

    def close(self) -> None:
        """End threads and connections. Idempotent. All ranks call it."""
        super().close()
        self._metrics.close()


def _addresses(server: object) -> dict[str, ServiceAddress]:
    """Where the services of strategies are, by the strategy's name."""
    found = {name: strategy.address(server) for name, strategy in STRATEGIES.items() if strategy.address is not None}
    return {name: address for name, address in found.items() if address is not None}
